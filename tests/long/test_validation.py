"""Evaluation while training with the real samplers: it changes nothing, a kill repeats nothing, and it gives what the
evaluation in a process of its own gives. A fork of a run goes on as the run did."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.data.table import load_problems
from rlcore.evaluation.records import read_records
from rlcore.evaluation.rows import EvalRow, read_rows
from rlcore.failures import EXIT_DONE
from rlcore.segment.lease import Control
from rlcore.segment.spec import SegmentSpec
from rlcore.segment.store import LocalCheckpointStore
from rlcore.specs import EvaluateSpec, EvaluationPart
from tasks.fork import fork_run
from tasks.run import Run
from tests.integration.tiny_run import ALONE, APART, CORRECTED, PARTIAL, experiment, numbers, prepared, run
from tests.integration.trainer_process import log_of, spec_of, start
from tests.train_states import load_full_weights

DECODING: dict[str, Any] = {
    "evaluation.every_steps": 1,
    "evaluation.problems": 5,
    "evaluation.samples": 2,
    "evaluation.temperature": 0.6,
    "evaluation.top_p": 0.9,
}


@pytest.fixture(scope="module")
def held_out(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems with other pictures than those that are trained on, so a rank must read them from their own folder."""
    folder = prepared(tmp_path_factory.mktemp("held-out"), experiment(**{"data.synthetic_seed": 7}), None)
    trained = {image.sha256 for problem in load_problems(dataset) for image in problem.images}
    assert not trained & {image.sha256 for problem in load_problems(folder) for image in problem.images}
    return folder


LONG_PREFIX = {"data.system_prompt": "Look at the picture. " * 6}  # all prompts share a block of keys and values


@pytest.mark.parametrize(
    "placement",
    [{}, {**ALONE, **LONG_PREFIX}, {**ALONE, **CORRECTED, **PARTIAL}, {**APART, **CORRECTED, **PARTIAL}],
    ids=["two-ranks", "shared-prefix", "partial", "partial-disaggregated"],
)
def test_training_is_the_same_with_it_bit_for_bit(
    tiny_model: Path, dataset: Path, held_out: Path, tmp_path: Path, placement: dict[str, Any]
) -> None:
    config = experiment(**placement, **DECODING)
    plain = run(tmp_path / "plain", tiny_model, dataset, config, until=4)
    watched = run(tmp_path / "watched", tiny_model, dataset, config, until=4, validation=held_out)
    assert watched == plain  # tokens of every rollout, and a hash of the weights
    assert numbers(tmp_path / "watched") == numbers(tmp_path / "plain")
    reports = [record.report for record in read_records(tmp_path / "watched")]
    assert [report.step for report in reports] == [0, 1, 2, 3, 4]
    assert {(report.num_problems, report.samples_per_problem) for report in reports} == {(5, 2)}
    texts = [[row.completion for row in read_rows(Path(report.table))] for report in reports]
    assert texts[0] != texts[4]  # of other weights


def test_a_kill_repeats_no_evaluation_each_equals_that_of_its_own_process_and_a_fork_goes_on_the_same(
    tiny_model: Path, dataset: Path, held_out: Path, tmp_path: Path
) -> None:
    reward = tmp_path / "letters.py"  # random weights are never right, but not all equally wordy
    reward.write_text(
        "def reward(text, problem, num_tokens, finish_reason):\n"
        "    share = sum(map(str.isalpha, text)) / max(1, len(text))\n"
        "    return {'reward': share, 'accuracy': float(share > 0.5)}\n"
    )
    config = experiment(
        **ALONE, **DECODING,
        **{"training.steps": 6, "segment.steps": 2, "reward.name": "user", "reward.file": str(reward)},
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    plain = _spec(whole, tiny_model, dataset, config, None)
    assert start(plain).wait(600) == EXIT_DONE, log_of(whole)[-2000:]

    spec = _spec(killed, tiny_model, dataset, config, held_out)
    trainer = start(spec)
    while not (killed / "segments" / "0000.json").exists() or len(read_records(killed)) < 4:  # steps 0, 1, 2 and 3
        assert trainer.poll() is None, log_of(killed)[-2000:]
        time.sleep(0.01)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    committed = LocalCheckpointStore(killed, "run").latest()
    assert committed is not None
    kept = _files(killed, committed.step)
    assert kept
    Control(killed / "control.json").beat(9)
    assert start(spec).wait(600) == EXIT_DONE, log_of(killed)[-2000:]

    assert _files(killed, committed.step) == kept
    assert [record.report.step for record in read_records(killed)] == list(range(7))
    assert numbers(killed) == numbers(whole)
    weights = [load_full_weights(folder / "checkpoints" / "step-000006") for folder in (whole, killed)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])

    last = LocalCheckpointStore(killed, "run").latest()
    assert last is not None
    trainers = read_rows(Path(read_records(killed)[-1].report.table))
    assert trainers == _evaluated_alone(tmp_path / "alone", spec, last)
    assert len({row.accuracy for row in trainers} | {None}) > 1

    trunk = Run(run_id="run", run_dir=killed, experiment=config)
    forked = fork_run(trunk, 4, "forked", Settings(data_dir=tmp_path))
    Control(forked.run_dir / "control.json").beat(9)
    assert start(spec.model_copy(update={"run_id": "forked", "run_dir": forked.run_dir})).wait(600) == EXIT_DONE
    assert "from step 4" in log_of(forked.run_dir)
    assert numbers(forked.run_dir) == numbers(whole)
    branch = load_full_weights(forked.run_dir / "checkpoints" / "step-000006")
    assert all((weights[0][name] == branch[name]).all() for name in weights[0])


def _spec(run_dir: Path, model: Path, dataset: Path, config: Any, validation: Path | None) -> SegmentSpec:
    run_dir.mkdir()
    Control(run_dir / "control.json").beat(9)
    spec = spec_of(run_dir, model, dataset, config)
    if validation is None:
        return spec
    return spec.model_copy(update={"validation": spec.dataset.model_copy(update={"path": str(validation)})})


def _files(run_dir: Path, step: int) -> dict[str, bytes]:
    """The evaluations up to a step, to the byte."""
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in sorted((run_dir / "validation").glob("step-*/*"))
        if int(path.parent.name.removeprefix("step-")) <= step
    }


def _evaluated_alone(folder: Path, spec: SegmentSpec, policy: CheckpointRef) -> list[EvalRow]:
    assert spec.validation is not None
    folder.mkdir()
    job = EvaluateSpec(
        result=folder / "result.json", policy=policy, base=spec.model,
        parts=(EvaluationPart(experiment=spec.experiment, dataset=spec.validation, out_dir=folder),),
    )  # fmt: skip
    (folder / "spec.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "rlcore.jobs.evaluate", str(folder / "spec.json")]
    subprocess.run(command, check=True, timeout=300)
    return read_rows(folder / "completions.parquet")
