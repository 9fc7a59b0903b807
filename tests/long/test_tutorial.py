"""The tutorial, typed as it stands, in a copy of the project whose experiments are small."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from infra.settings import Settings
from rlcore.evaluation.records import journal_with_evaluations
from rlcore.segment.journal import read_journal
from tasks import experiments
from tasks.lineage import read_origins
from tasks.preflight import check
from tests.docs import code
from tests.docs.pages import ON_A_RUN, PAGES, ROOT, Block, blocks, code_words
from tests.shell import new_shell

COPIED = ("flows", "infra", "rlcore", "tasks", "Makefile", "prefect.yaml", "pyproject.toml")
SMALL = {
    "rollout": {"group_size": 2},
    "data": {"synthetic_problems": 64},
    "training": {"steps": 6, "problems_per_batch": 2},
    "segment": {"steps": 2},
    "evaluation": {"problems": 4, "samples": 1},
    "resources": {"workers": 1},
}
# The policy's weights are random and so never right. A mean over no trained token is not logged, so something has to
# tell its completions apart.
VOWELS = """\
def reward(text, problem, num_tokens, finish_reason):
    share = sum(c in "aeiou" for c in text) / max(1, len(text))
    return {"reward": share, "accuracy": share, "format": 0.0}
"""
# only with other settings: algorithm.kl.place=reward, reward.thoughts=strip, masks, a teacher, experts; or on a GPU
ELSEWHERE = {
    "reward/kl_penalty", "reward/unclosed_thought", "loss/entropy_masked", "loss/off_policy_masked", "teacher/kl",
    "time/teacher_logprobs", "rollout/routes_differ", "perf/update_mfu",
}  # fmt: skip
OTHER_REWARDS = ("judge/", "reward_model/")
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN_BLOCKS = [block for block in BLOCKS if block.is_run]
ON_A_RUN_BLOCKS = [block for block in BLOCKS if block.marker == ON_A_RUN]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as the reader has it, its environment installed, every tiny experiment small."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / name)
    values = yaml.safe_load((folder / "prefect.yaml").read_text())
    for experiment in values["definitions"]["experiments"].values():
        if experiment["model"]["path"] == "tiny":
            experiment.update({group: {**experiment.get(group, {}), **few} for group, few in SMALL.items()})
            tiny = {**experiment["model"].get("tiny", {}), "warm_start_steps": 0}
            experiment["model"] = {**experiment["model"], "tiny": tiny}
    (folder / "vowels.py").write_text(VOWELS)
    reward = {"name": "user", "file": str(folder / "vowels.py")}
    values["definitions"]["experiments"]["grpo-geo3k-tiny"]["reward"] = reward
    (folder / "prefect.yaml").write_text(yaml.safe_dump(values))
    for block in BLOCKS:
        if name := re.match(r"# (\S+\.py)\n", block.text):
            (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / name[1]).write_text(block.text)
    for made in (".venv", ".uv/bin"):
        (folder / made).mkdir(parents=True)
    for part in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    for installed in (".uv/bin/uv", ".venv/.installed-cpu"):  # make has nothing to do
        (folder / installed).touch()
    return folder


def type_in(project: Path, text: str, *, interrupt_when: Callable[[], bool] | None = None) -> tuple[int, str]:
    """Exit code and output of commands, in a shell of their own; with Ctrl-C as soon as ``interrupt_when`` says so."""
    log = project / "typed.log"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail", "-c", text],
            cwd=project,
            env=new_shell(PYTHONPATH=str(project), OMP_NUM_THREADS="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C goes to all of its processes
        )
        try:
            while interrupt_when and shell.poll() is None and not interrupt_when():
                time.sleep(0.05)
            if interrupt_when and shell.poll() is None:
                os.killpg(shell.pid, signal.SIGINT)
            shell.wait()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGTERM)
                shell.wait()
    return shell.returncode, log.read_text(errors="replace")


@pytest.mark.timeout(1500)  # half a minute for each of five starts of vLLM, where nobody else computes
def test_the_tutorial_does_what_it_says(project: Path) -> None:
    runs = project / "data" / "runs"
    for block in RUN_BLOCKS:
        if block.marker == "run":
            status, said = type_in(project, block.text)
            assert status == 0, f"{block}\n{said[-4000:]}"
            continue
        status, said = type_in(project, block.text, interrupt_when=lambda: bool(list(runs.glob("*/segments/*.json"))))
        assert status != 0, f"{block} was to be interrupted"
        assert "Continue with: " in said, f"{block}\n{said[-4000:]}"
        (run,) = runs.iterdir()
        assert not (run / "finished").exists()

    (run,) = runs.iterdir()
    assert (run / "finished").exists()
    assert (run / "report" / "report.html").stat().st_size > 10_000
    records = read_journal(run / "journal.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    named = {name for page in PAGES for word in code_words(page) for name in code.metrics_in(word)} & code.metrics()
    assert len(named) > 20
    logged = {name for record in journal_with_evaluations(run) for name in record.metrics}
    named = {name for name in named - ELSEWHERE if not name.startswith(OTHER_REWARDS)}
    assert named <= logged, "metrics that pages name and the run does not have"


@pytest.fixture(scope="module")
def finished(project: Path) -> Path:
    """The folder of the tutorial's run, or of the same run where only the tests below are chosen."""
    runs = project / "data" / "runs"
    if not list(runs.glob("*/finished")):
        status, said = type_in(project, ".venv/bin/rlflow train grpo-geo3k-tiny")
        assert status == 0, said[-4000:]
    (marker,) = runs.glob("*/finished")
    return marker.parent


@pytest.mark.timeout(900)  # a minute, where nobody else computes
@pytest.mark.parametrize("block", ON_A_RUN_BLOCKS, ids=str)
def test_commands_on_a_finished_run_do_what_their_pages_say(project: Path, finished: Path, block: Block) -> None:
    origin = read_origins(finished)[-1]
    names = {
        r"grpo-geo3k@(champion|verified)": "grpo-geo3k-tiny@verified",
        r"data/datasets/TRAIN": origin.train.path,
        r"data/datasets/EVALUATION": origin.validation.path,
        r"\bRUN\b": finished.name,
        r"--run-id NAME\b": "--run-id another",
        r"\bNAME\b": "grpo-geo3k-tiny",
        r"\bFOLDER\b": "published",
        r"--step \d+": "--step 4",
        r"training\.steps=\d+": "training.steps=8",
    }
    text = block.text
    for pattern, name in names.items():
        text = re.sub(pattern, name, text)
    status, said = type_in(project, text)
    assert status == 0, f"{block}\n{text}\n{said[-4000:]}"


def test_the_tutorial_s_own_data_and_reward_pass_every_check_before_training(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "make_sums.py"], cwd=project, check=True)
    sets = [f"data.{split}={project / 'sums'}" for split in ("train", "validation")]
    reward = ["reward.name=user", f"reward.file={project / 'my_reward.py'}"]
    monkeypatch.setattr(experiments, "PREFECT_YAML", project / "prefect.yaml")
    experiment = experiments.load_experiment("grpo-gsm8k-tiny", [*sets, *reward])
    facts = check(experiment, Settings(data_dir=tmp_path)).facts
    assert facts["reward"] == "user, 3 made-up completions graded"
    assert facts["training data"] == str(project / "sums")  # JSON lines are not counted before they are read
    assert len((project / "sums" / "train.jsonl").read_text().splitlines()) == 512
