"""A run whose evaluation is greedy, and its model used as people use it: by its name in MLflow, behind vLLM's server,
and as a folder for the hub. The first two give the completions that the evaluation recorded."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from infra.settings import Settings
from rlcore.config import TinyModelConfig
from rlcore.data.table import load_problems
from rlcore.evaluation.rows import EvalRow, read_rows
from rlcore.types import Problem
from tasks.compare import find_evaluations
from tasks.lineage import read_origins
from tasks.registered import row_of
from tasks.run import existing_run
from tests.docs.pages import ROOT
from tests.ports import reserved_port
from tests.shell import new_shell
from tests.warm_start import warm_started

NAME, KEY = "grpo-geo3k-tiny", "sesame"
SETTINGS = (
    *("training.steps=2", "evaluation.temperature=0", "evaluation.samples=1", "evaluation.problems=6"),
    *("data.synthetic_problems=64", "data.system_prompt=Be brief."),
    *("model.check=off", "model.lora.rank=8", "training.learning_rate=0.01"),
)


@dataclass(frozen=True)
class Done:
    """A finished run: its problems, and what the evaluation of its last step recorded of each."""

    data_dir: Path
    problems: list[Problem]
    recorded: list[str]

    def rlflow(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "tasks.cli", *words]

    @property
    def environment(self) -> dict[str, str]:
        return new_shell({"RLFLOW_DATA_DIR": str(self.data_dir), "SERVE_KEY": KEY})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("registered")
    data_dir, policy = folder / "data", folder / "policy"
    shutil.copytree(tiny_model, policy)
    # the configuration of test_warm_start, so that both tests use one cached policy
    warm = warm_started(TinyModelConfig(family="qwen2_5_vl"))
    shutil.copy(warm.folder / "model.safetensors", policy)
    run = Done(data_dir, [], [])
    options = [word for setting in (*SETTINGS, f"model.path={policy}") for word in ("--set", setting)]
    answer = subprocess.run(
        run.rlflow("train", NAME, "--run-id", "greedy", *options),
        env=run.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLFLOW_DATA_DIR", str(data_dir))
        settings = Settings()
        (known,) = find_evaluations("greedy:2", settings)
        rows: dict[str, EvalRow] = {row.problem_id: row for row in read_rows(Path(known.report.table))}
        (origin,) = read_origins(existing_run("greedy", settings).run_dir)
        problems = [item for item in load_problems(Path(origin.validation.path)) if item.problem_id in rows]
        assert len(problems) == 6
        assert all(problem.images for problem in problems)
        yield Done(data_dir, problems, [rows[item.problem_id].completion for item in problems])


def test_the_recorded_completions_differ(done: Done) -> None:
    """Otherwise the other tests would prove little."""
    assert len(set(done.recorded)) > 1


def test_a_model_that_is_loaded_by_its_name_says_what_the_evaluation_recorded(done: Done) -> None:
    settings = Settings()
    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    client.set_registered_model_alias(NAME, "champion", "1")
    script = (
        "import json, sys, mlflow, pandas\n"
        f"mlflow.set_tracking_uri({settings.tracking_uri!r})\n"
        f"model = mlflow.pyfunc.load_model('models:/{NAME}@champion')\n"
        "answers = model.predict(pandas.DataFrame(json.load(sys.stdin)))\n"
        "example = model.predict(model.input_example)\n"
        "heavy = [name for name in ('vllm', 'ray', 'prefect') if name in sys.modules]\n"
        "print(json.dumps([answers['completion'].tolist(), len(example), heavy]))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps([row_of(item) for item in done.problems]),
        env=done.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    completions, examples, heavy = json.loads(answer.stdout.splitlines()[-1])
    assert completions == done.recorded
    assert (examples, heavy) == (1, [])


def test_mlflow_orders_checkpoints_by_their_evaluation(done: Done) -> None:
    settings = Settings()
    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    version = client.get_model_version_by_alias(NAME, "verified")
    run = client.get_run(version.run_id)
    found = {client.get_logged_model(item.model_id).name: item.step for item in run.outputs.model_outputs}
    assert found == {f"{NAME}-step-000002": 2, NAME: 2}
    ordered = client.search_logged_models(
        [run.info.experiment_id],
        filter_string="metrics.`eval/accuracy` >= 0",
        order_by=[{"field_name": "metrics.eval/accuracy"}],
    )
    assert {f"{NAME}-step-000002", NAME} <= {item.name for item in ordered}


@contextmanager
def serving(done: Done, *words: str) -> Iterator[int]:
    """Port of the server, once it answers."""
    port = reserved_port()
    log = done.data_dir / f"serve-{port}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            done.rlflow("serve", *words, "--port", str(port), "--key-variable", "SERVE_KEY"),
            env=done.environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 600
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def asked(port: int, model: str, problem: Problem, key: str = KEY) -> str:
    """The bare question and its pictures, as any client of the protocol would send them."""
    images: Any = row_of(problem)["images"]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images
    ]
    parts.append({"type": "text", "text": problem.question.removeprefix("<image>")})
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_a_served_model_says_what_the_evaluation_recorded_and_wants_its_key(done: Done) -> None:
    with serving(done, f"{NAME}@verified") as port:
        assert [asked(port, NAME, problem) for problem in done.problems] == done.recorded
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(port, NAME, done.problems[0], key="wrong")


def test_chat_says_what_the_evaluation_recorded(done: Done, tmp_path: Path) -> None:
    problem = done.problems[0]
    pictures = [word for path in pictures_of(problem, tmp_path) for word in ("--picture", str(path))]
    answer = subprocess.run(
        done.rlflow("chat", f"{NAME}@verified", *pictures, "--question", problem.question),
        env=done.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout == f"{done.recorded[0]}\n"


def pictures_of(problem: Problem, folder: Path) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(problem.images))]
    for path, image in zip(paths, row_of(problem)["images"], strict=True):
        path.write_bytes(base64.b64decode(image))
    return paths


def test_rollouts_of_the_segment_are_traces_of_the_run(done: Done) -> None:
    settings = Settings()
    client = mlflow.MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    version = client.get_model_version_by_alias(NAME, "verified")
    run = client.get_run(version.run_id)
    traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    assert {trace.info.tags["rlflow.rollout"] for trace in traces} == {f"step-2/{n}" for n in range(settings.traces)}
    folder = existing_run("greedy", settings).run_dir / "samples"
    saved = {row["completion"] for row in json.loads((folder / "step-000002.json").read_bytes())}
    said = {trace.data.spans[0].outputs["choices"][0]["message"]["content"] for trace in traces}
    assert said <= saved


def test_adapters_are_served_from_a_checkpoint_that_was_not_merged(done: Done) -> None:
    merged = done.data_dir / "models" / "merged-greedy-step-2"
    aside = merged.rename(merged.with_name("aside"))
    try:
        with serving(done, "greedy") as port:
            assert [asked(port, "greedy", problem) for problem in done.problems] == done.recorded
    finally:
        aside.rename(merged)


def test_a_pushed_folder_is_a_model_with_a_card(done: Done, tmp_path: Path) -> None:
    out = tmp_path / "pushed"
    answer = subprocess.run(
        done.rlflow("push", f"{NAME}@verified", str(out)),
        env=done.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.splitlines()[-1] == str(out)
    assert str(AutoModelForImageTextToText.from_pretrained(out).dtype) == "torch.bfloat16"
    assert AutoProcessor.from_pretrained(out).chat_template
    card = (out / "README.md").read_text()
    (known,) = find_evaluations("greedy:2", Settings())
    report = known.report
    row = f"| 6 x 1 | {report.accuracy:.3f} | [{report.accuracy_low:.3f}, {report.accuracy_high:.3f}] |"
    assert f"| validation | 2 {row}" in card
    assert "System prompt: 'Be brief.'" in card
    assert "| training.learning_rate | 0.01 |" in card
    assert (out / "curves.png").stat().st_size > 10_000
    assert str(done.data_dir) not in card
