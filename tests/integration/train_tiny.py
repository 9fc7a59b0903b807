"""Run in a process of its own: the real loop with FSDP2 and vLLM on the tiny policy with random weights, its ranks as
Ray's actors or forked.

Only the grader is a stand-in, because random weights never
give a right answer: it rewards the share of letters, which varies within a group, or (``coarse``) a number of letters
that three divides, which leaves every fifth group of four without signal.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rlcore.process import making_what_stays

with making_what_stays():
    from rlcore.config import ExperimentConfig
    from rlcore.data.table import load_problems
    from rlcore.distributed.actors import start_ranks
    from rlcore.distributed.cluster import start_ray, stop_ray
    from rlcore.distributed.group import WorkerGroup
    from rlcore.distributed.worker import make_worker
    from rlcore.evaluation.validation import Validation
    from rlcore.rollout.groups import Group
    from rlcore.segment.journal import MetricJournal
    from rlcore.training.loop import train
    from rlcore.training.run import TrainingRun, TrainState
    from rlcore.types import Completion, Problem, Score
    from tests.integration.forked_ranks import ForkedRanks
    from tests.quiet_grader import QuietGrader
    from tests.train_states import load_full_weights


class LetterGrader(QuietGrader):
    def __init__(self, coarse: bool) -> None:
        self._coarse = coarse

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        letters = [sum(c.isalpha() for c in x.text) for x in completions]
        rewards = [n / max(1, len(x.text)) for n, x in zip(letters, completions, strict=True)]
        if self._coarse:
            rewards = [float(n % 3 == 0) for n in letters]
        future.set_result([Score(r, {"accuracy": r}, graded=True) for r in rewards])
        return future


def main(settings: dict[str, object]) -> None:
    config = ExperimentConfig.model_validate(settings["experiment"])
    out, resume = Path(str(settings["out"])), settings["resume"]
    dataset = Path(str(settings["dataset"]))
    tokens: list[str] = []

    def keep(step: int, groups: Sequence[Group], trained: Sequence[Group]) -> None:
        for group in groups:
            ids = [r.completion.token_ids.tolist() for r in group.rollouts]
            versions = {r.completion.policy_version for r in group.rollouts}
            tokens.append(f"{step} {group.problem.problem_id} {sorted(versions)} {ids}")

    with ExitStack() as ends:
        if settings["through_ray"]:
            start_ray(None, config.resources.devices)
            ends.callback(stop_ray)
        start = start_ranks if settings["through_ray"] else ForkedRanks
        device = config.resources.device
        model, teacher = (Path(str(settings[name])) if settings[name] else None for name in ("model", "teacher"))
        ranks = start(make_worker, model=model, dataset=dataset, config=config, device=device, teacher=teacher)
        ends.callback(ranks.close)
        workers = WorkerGroup(ranks, config)
        state = TrainState()
        if resume:
            folder = Path(str(resume))
            scalars = json.loads((folder / "state.json").read_text())
            state = TrainState.load(
                folder, scalars, load_problems(dataset), mask_truncated=config.algorithm.mask_truncated
            )
            workers.load(folder)
        workers.sync_weights(state.step)
        grader = LetterGrader(coarse=bool(settings.get("coarse")))
        run = TrainingRun(config, load_problems(dataset), workers, grader, MetricJournal(out / "journal.jsonl"), keep)
        if settings["validation"]:
            validation = _validation(run, out, Path(str(settings["validation"])))
            run = replace(run, validate=validation.evaluate)
            run.validate(state.step)
        for name, until in {"cut": settings["cut"], "checkpoint": settings["until"]}.items():
            if until is None:
                continue
            state = train(run, state, until_step=int(str(until)), should_stop=lambda: False)
            checkpoint = out / name
            checkpoint.mkdir()
            workers.begin_save(checkpoint)
            while not workers.saved():
                time.sleep(0.01)
            state.save(checkpoint)
            (checkpoint / "state.json").write_text(json.dumps(state.scalars()))
    result = {"weights": _digest(out / "checkpoint", settings), "tokens": tokens}
    if settings["cut"] is not None:
        result["weights_at_cut"] = _digest(out / "cut", settings)
    (out / "result.json").write_text(json.dumps(result))


def _validation(run: TrainingRun, out: Path, dataset: Path) -> Validation:
    run.workers.add_images(dataset)
    return Validation(
        config=run.config.evaluation,
        problems=load_problems(dataset),
        sampler=run.workers,
        grader=run.grader,
        run_dir=out,
        suite="",
        dataset_digest="",
        should_stop=lambda: False,
    )


def _digest(checkpoint: Path, settings: dict[str, object]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(load_full_weights(checkpoint, Path(str(settings["model"]))).items()):
        digest.update(name.encode() + value.float().numpy().tobytes())
    return digest.hexdigest()
