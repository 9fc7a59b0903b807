"""The training flow in the foreground, as a user starts it, for random policies in the shapes of real ones (``make
demo-gpu``): ``python -m tests.whole_flow [--shape vl-3b] [--data FOLDER]``.

Makes the model, runs ``rlflow train`` in two segments with a reward that random weights can earn, and kills the trainer
in the second one. The flow must recover by itself and end with a registered model. Needs no network. Prints a table of
seconds and memory by stage and, as its last line, the flow's JSON. Ends with 1 where anything is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from infra.provenance import ROOT, describe_hardware
from rlcore.files import VERIFIED
from rlcore.segment.spec import segment_path
from tests.chaos.victims import Scene
from tests.stages import Course, MeasuredStage, MemoryWatch, Stage, course_of, table, task_stages

# Random weights are never right. The share of vowels differs within a group, so every group has a gradient.
_VOWELS = """\
def reward(text, problem, num_tokens, finish_reason):
    letters = [c for c in text.lower() if c.isascii() and c.isalpha()]
    return sum(c in "aeiou" for c in letters) / max(1, len(letters))
"""
RUN = "whole"
_TRAINER_STARTED = "train: started a trainer "
_LOOK_SECONDS = 0.02
_END_SECONDS = 60.0


class HarmedError(Exception):
    """The flow failed, or did not go as the demo promises. The message is for the reader."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A flow that has ended."""

    lines: list[tuple[float, str]]  # with seconds since the epoch
    began: float
    ended: float
    code: int

    @property
    def result(self) -> dict[str, Any]:
        """Its last line.

        Raises:
            HarmedError: it failed.
        """
        texts = [text for _, text in self.lines if text]
        if self.code != 0:
            raise HarmedError("\n".join([*texts[-40:], f"rlflow train ended with {self.code}"]))
        result: dict[str, Any] = json.loads(texts[-1])
        return result


def vowels(folder: Path) -> dict[str, object]:
    """Settings of a reward that varies. Writes it to ``folder``."""
    reward = folder / "vowels.py"
    reward.write_text(_VOWELS)
    return {"reward.name": "user", "reward.file": reward, "health": "[]"}


def run_flow(
    experiment: str,
    settings: Mapping[str, object],
    folder: Path,
    *,
    watch: Callable[[Callable[[], psutil.Process | None]], object] | None = None,
) -> Flow:
    """Run ``rlflow train`` to its end. Each line is printed with the seconds so far.

    Args:
        settings: by dotted name, over the experiment's own.
        folder: gets the data folder.
        watch: runs in a thread during the flow; gets a function that returns the flow's process while it lives.
    """
    options = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    began, start = time.time(), time.monotonic()
    flow = subprocess.Popen(
        [sys.executable, "-m", "tasks.cli", "train", experiment, "--run-id", RUN, *options],
        cwd=ROOT,
        env=os.environ | {"RLFLOW_DATA_DIR": str(folder / "data"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert flow.stdout is not None

    def process() -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(flow.pid) if flow.poll() is None else None
        return None

    thread = threading.Thread(target=watch, args=(process,), daemon=True) if watch is not None else None
    lines = []
    with _ended(flow):
        if thread is not None:
            thread.start()
        for line in flow.stdout:
            sys.stdout.write(f"{time.monotonic() - start:7.1f} {line}")
            sys.stdout.flush()
            lines.append((time.time(), line.strip()))
    if thread is not None:
        thread.join()
    return Flow(lines, began, time.time(), flow.returncode)


@contextmanager
def _ended(flow: subprocess.Popen[str]) -> Iterator[None]:
    """If the block fails, interrupt the flow as Ctrl-C does: it stops its trainer and its servers."""
    try:
        yield
        flow.wait()
    finally:
        if flow.poll() is None:
            flow.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                flow.communicate(timeout=_END_SECONDS)
            flow.kill()


@dataclass(slots=True)
class Kill:
    """Kills a run's trainer once, by SIGKILL, when the first segment is committed and the second has a step."""

    run_dir: Path
    last_step: int
    at: float | None = None  # seconds since the epoch
    step: int = 0  # the last one in the journal

    def __call__(self, flow: Callable[[], psutil.Process | None]) -> None:
        scene = Scene(self.run_dir, Path(os.devnull), flow)
        while flow() is not None and self.at is None:
            if self._is_time(scene) and (trainer := scene.trainer()) is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    trainer.suspend()  # so that what is seen now is so at the kill
                    if self._is_time(scene):
                        self.step, self.at = scene.steps, time.time()
                        trainer.kill()
                    trainer.resume()
            time.sleep(_LOOK_SECONDS)

    def _is_time(self, scene: Scene) -> bool:
        if not segment_path(self.run_dir, 0).exists():
            return False
        return scene.committed < scene.steps and scene.committed < self.last_step


# ---- the demo ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """How a shape is trained: an experiment of prefect.yaml, made short."""

    experiment: str
    settings: Mapping[str, object]
    drawn: Mapping[str, object]  # data that is used without --data


_STEPS, _SEGMENT = 4, 2
_SHORT: Mapping[str, object] = {
    "training.steps": _STEPS,
    "training.problems_per_batch": 16,
    "training.mini_batches": 1,
    # compiling takes longer than it saves in four steps
    "training.compile_blocks": "off",
    "rollout.compile_engine": False,
    "rollout.max_completion_tokens": 256,
    "segment.steps": _SEGMENT,
    "segment.keep_checkpoints": 1,
    "evaluation.problems": 32,
    "resources.workers": 1,
}
_TINY: Mapping[str, object] = {
    **_SHORT,
    "training.problems_per_batch": 4,
    "training.tokens_per_microbatch": 4096,
    "rollout.group_size": 3,
    "rollout.max_completion_tokens": 16,
    "rollout.kv_cache_mib": 64,
    "evaluation.problems": 4,
    "data.max_prompt_tokens": 1000,
    "resources.device": "cpu",
}
_DRAWN = 256  # problems; validation has an eighth
_SUMS: Mapping[str, object] = {
    "data.train": "sums@train",
    "data.validation": "sums@test",
    "data.problem_column": "problem",
    "data.synthetic_problems": _DRAWN,
}
_GEOMETRY: Mapping[str, object] = {
    "data.train": "synthetic-geometry@train",
    "data.validation": "synthetic-geometry@test",
    "data.synthetic_problems": _DRAWN,
}
_PIXELS = {"data.max_pixels": 401_408}
# A full checkpoint of VL-3B has 42 GiB, and two of them are on the disk for a moment.
_LORA = {"model.lora.rank": 32}
CASES: Mapping[str, Case] = {
    "text-1.5b": Case("grpo-gsm8k", _SHORT, _SUMS),
    "vl-3b": Case("grpo-geo3k-3b", {**_SHORT, **_PIXELS, **_LORA}, _GEOMETRY),
    "vl-7b": Case("grpo-geo3k", {**_SHORT, **_PIXELS, **_LORA}, _GEOMETRY),
    "tiny-text": Case("grpo-gsm8k", _TINY, _SUMS),
    "tiny-vl": Case(
        "grpo-geo3k-3b",
        {**_TINY, "model.lora.rank": 8, "data.min_pixels": 3136, "data.max_pixels": 50_176},
        _GEOMETRY,
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a demo has shown. ``harms`` is empty if all of it went as promised."""

    shape: str
    device: str
    result: dict[str, Any]
    seconds: dict[str, float]
    rewards: list[float]  # mean of each step
    reward_deviations: list[float]  # over the completions of each step
    zero_signal: list[float]  # share of groups without a gradient, of each step
    torch_peak_gib: float  # on the device; without a GPU, of the worker's process
    stages: list[MeasuredStage]
    harms: list[str]

    def text(self) -> str:
        figures = "\n".join(f"{name:40} {value:7.1f} s" for name, value in self.seconds.items())
        rewards = ", ".join(f"{value:.3f}" for value in self.rewards)
        memory = f"{'torch, peak of a step':40} {self.torch_peak_gib:7.1f} GiB"
        return f"{table(self.stages)}\n\n{figures}\n{memory}\n{'reward by step':40} {rewards}\n"


def run_demo(shape: str, folder: Path, settings: Mapping[str, object] | None = None) -> Outcome:
    """Make the model of ``shape`` and run its flow, with one kill.

    Args:
        folder: gets the model and the data folder; what another demo has left there is removed.
        settings: by dotted name, over those of the case. Without ``data.train``, problems are drawn.

    Raises:
        HarmedError: the flow failed, or the trainer was never killed.
    """
    case, given = CASES[shape], dict(settings or {})
    for name in ("model", "data"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with MemoryWatch().running() as memory:
        started = time.time()
        # In a process of its own, which gives the GPU's memory back.
        subprocess.run([sys.executable, "-m", "tests.downloaded", shape, str(folder / "model")], cwd=ROOT, check=True)
        made = Stage("make the random model", started, time.time())
        values = {
            "name": f"demo-{shape.replace('.', '-')}",  # random weights shall be no champion of a benchmark
            "model.path": folder / "model",
            **vowels(folder),
            **({} if "data.train" in given else case.drawn),
            **case.settings,
            **given,
        }
        kill = Kill(folder / "data" / "runs" / RUN, int(str(values["training.steps"])))
        try:
            flow = run_flow(case.experiment, values, folder, watch=kill)
        except BaseException:  # ended by a limit of time or by a person, it has measured something
            sys.stdout.write(f"\n{table(memory.measured([made, *task_stages(folder / 'data')]))}\n")
            raise
    return _outcome(shape, folder, flow, kill, made, memory)


def _outcome(shape: str, folder: Path, flow: Flow, kill: Kill, made: Stage, memory: MemoryWatch) -> Outcome:
    data_dir, starts = folder / "data", [at for at, text in flow.lines if _TRAINER_STARTED in text]
    tasks = task_stages(data_dir)
    if flow.code != 0 or kill.at is None or len(starts) != 2:
        sys.stdout.write(f"\n{table(memory.measured([made, *tasks]))}\n")
        result = flow.result  # raises where the flow failed
        raise HarmedError(
            f"the flow ended with {json.dumps(result)}, but its trainer was started {len(starts)} times and killed "
            f"{'never' if kill.at is None else 'once'}. Expected: one kill and two starts."
        )
    outside = [
        made,
        Stage("the command and its servers start", flow.began, min(stage.began for stage in tasks)),
        Stage("the command ends", max(stage.ended for stage in tasks), flow.ended),
    ]
    course = course_of(data_dir, kill.run_dir, outside, starts, kill.at)
    seconds = {**course.seconds, **{f"merge: {name}": value for name, value in merge_seconds(flow.result).items()}}
    return Outcome(
        shape=shape,
        device=str(describe_hardware()),
        result=flow.result,
        seconds={name: round(value, 2) for name, value in seconds.items()},
        rewards=[record.metrics["reward/mean"] for record in course.records],
        reward_deviations=[record.metrics["reward/std"] for record in course.records],
        zero_signal=[record.metrics["rollout/zero_signal"] for record in course.records],
        torch_peak_gib=max(record.metrics["system/peak_memory_gib"] for record in course.records),
        stages=memory.measured([*course.stages, Stage("all of it", made.began, flow.ended)]),
        harms=harms_of(flow.result, course, kill),
    )


def merge_seconds(result: Mapping[str, Any]) -> dict[str, float]:
    """Of each part of the merge. Empty: the model is not verified, which ``harms_of`` tells."""
    record = Path(result["merged_model"]) / VERIFIED
    parts: dict[str, float] = json.loads(record.read_text())["seconds_of_parts"] if record.is_file() else {}
    return parts


def harms_of(result: Mapping[str, Any], course: Course, kill: Kill) -> list[str]:
    """What did not go as the demo promises."""
    harms = []
    if result["steps"] != kill.last_step:
        harms.append(f"the flow ended at step {result['steps']} of {kill.last_step}")
    if [record.step for record in course.records] != list(range(1, kill.last_step + 1)):
        harms.append(f"the journal has the steps {[record.step for record in course.records]}")
    if not (Path(result["merged_model"]) / VERIFIED).is_file():
        harms.append(f"the merged model {result['merged_model']} is not verified")
    if all(record.metrics["rollout/zero_signal"] == 1 for record in course.records):
        harms.append("the reward never differed within a group")
    return harms


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.whole_flow", description=__doc__)
    parser.add_argument("--shape", choices=CASES, default="vl-3b", help="tiny-text and tiny-vl run on a CPU")
    parser.add_argument("--data", type=Path, help="folder with train and validation files; default: drawn problems")
    parser.add_argument("--folder", type=Path, help="for model and run; default: demo-gpu/SHAPE in the data folder")
    parser.add_argument("--out", type=Path, help="file for the JSON with all figures; the table is written next to it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting; repeatable")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the flow is interrupted
    default = Path(os.environ.get("RLFLOW_DATA_DIR", "data")) / "demo-gpu" / options.shape
    settings: dict[str, object] = dict(text.split("=", 1) for text in options.set)
    if options.data is not None:
        settings = {f"data.{split}": options.data.absolute() for split in ("train", "validation")} | settings
    try:
        outcome = run_demo(options.shape, (options.folder or default).absolute(), settings)
    except HarmedError as error:
        sys.stdout.write(f"\nHARMED: {error}\n")
        return 1
    sys.stdout.write(f"\n{outcome.text()}\n")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        options.out.with_suffix(".md").write_text(f"{outcome.text()}\n{json.dumps(outcome.result)}\n")
    for text in outcome.harms:
        sys.stdout.write(f"HARMED: {text}\n")
    sys.stdout.write(json.dumps(outcome.result) + "\n")
    return int(bool(outcome.harms))


if __name__ == "__main__":
    sys.exit(main())
