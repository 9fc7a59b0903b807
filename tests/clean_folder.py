"""A data folder of several finished and unfinished runs, made in a second with the functions that real runs use."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from infra.settings import Settings
from infra.tracking.results import registered_versions
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelRef
from rlcore.files import write_json_atomically
from rlcore.segment.spec import SegmentEnd
from rlcore.segment.store import LocalCheckpointStore, verify_checkpoint
from tasks.champion import Evaluation, all_runs, evaluations
from tasks.clean.decide import DAY_SECONDS
from tasks.experiments import load_experiment
from tasks.fork import fork_run
from tasks.lineage import Origin, read_origins
from tasks.run import Run, append_line, open_run

BLOCK = b"x" * 20_000


@dataclass(frozen=True)
class Folder:
    settings: Settings

    @property
    def data(self) -> Path:
        return self.settings.data_dir

    def run(self, name: str, *, steps: tuple[int, ...] = (), finished: bool, dataset: str = "shared") -> Run:
        """A run with a checkpoint after each of ``steps``, an origin, a log and a page. Nobody drives it."""
        run = open_run(load_experiment("grpo-geo3k-tiny"), name, self.settings)
        (run.run_dir / "drivers.jsonl").unlink()  # that was this process
        for step in steps:
            self.checkpoint(run, step)
        append_line(run.run_dir / "origins.jsonl", self.origin(dataset).model_dump_json())
        (run.run_dir / "trainer.log").write_bytes(BLOCK)
        for part, file in (("report", "report.html"), ("stacks/hang-1", "rank-0.txt")):
            (run.run_dir / part).mkdir(parents=True)
            (run.run_dir / part / file).write_bytes(BLOCK)
        if finished:
            run.finished_marker.touch()
        return run

    def checkpoint(self, run: Run, step: int) -> CheckpointRef:
        store = LocalCheckpointStore(run.run_dir, run.run_id)
        staged = store.stage(step)
        (staged / "weights.bin").write_bytes(BLOCK + f"{run.run_id} {step}".encode())
        end = SegmentEnd(segment=0, first_step=0, complete=True)
        digests = {"experiment_digest": "e", "dataset_digest": "d", "model_digest": "m"}
        return store.commit(staged, step=step, end=end, trainer_state={"step": step}, **digests)

    def dataset(self, name: str) -> DatasetRef:
        path = self.settings.datasets_dir / name
        if not path.exists():
            (path / "images").mkdir(parents=True)
            (path / "images" / "1.png").write_bytes(BLOCK)
            (path / "report.json").write_text(json.dumps({"digest": name}))
        return DatasetRef(
            path=str(path), digest=name, source="s", num_problems=1, num_rejected=0, num_images=1, max_prompt_tokens=1
        )

    def model(self, name: str) -> ModelRef:
        path = self.settings.models_dir / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_bytes(BLOCK)
        (path / "config.json").write_text("{}")
        return ModelRef(path=str(path), digest=name, source="tiny", num_parameters=1)

    def origin(self, dataset: str) -> Origin:
        return Origin(
            at="2026-01-01", commit="", patch=None, code_digest="c", environment="e", python="3.11", hardware="h",
            versions={}, reward=None, template="t", train=self.dataset(dataset), validation=self.dataset(dataset),
            base=self.model("tiny-base"),
        )  # fmt: skip

    def evaluation(self, key: str, policy: Path, step: int) -> EvalReport:
        folder = self.settings.evaluations_dir / key
        folder.mkdir(parents=True)
        (folder / "completions.parquet").write_bytes(BLOCK)
        report = EvalReport(
            policy=str(policy), step=step, dataset_digest="d", num_problems=1, samples_per_problem=1, accuracy=0.5,
            accuracy_low=0.4, accuracy_high=0.6, reward=0.5, reward_low=0.4, reward_high=0.6, truncated=0.0,
            ungraded=0.0, table=str(folder / "completions.parquet"), seconds=1.0,
        )  # fmt: skip
        write_json_atomically(folder / "report.json", report.model_dump_json())
        self.record(f"{key}.json", report.model_dump_json())
        return report

    def record(self, name: str, text: str) -> None:
        write_json_atomically(self.data / "made" / name, text)

    def rows(self, run: Run, report: EvalReport) -> None:
        """A line of the leaderboard."""
        line = Evaluation(benchmark="geo3k", key="k", report=report)
        append_line(run.run_dir / "evaluations.jsonl", line.model_dump_json())

    def age(self, days: float, *paths: Path) -> None:
        """Make these, or everything, look as if ``days`` had passed since it was written."""
        for root in paths or (self.data,):
            for path in (root, *root.rglob("*")):
                changed = path.lstat().st_mtime - days * DAY_SECONDS
                os.utime(path, (changed, changed), follow_symlinks=False)


def make_folder(data_dir: Path) -> Folder:
    """Everything that ``clean`` has to tell apart. All of it is 40 days old."""
    folder = Folder(Settings(data_dir=data_dir))
    data = folder.data
    data.mkdir(parents=True, exist_ok=True)
    done = folder.run("done", steps=(10, 20, 30), finished=True, dataset="of-done")
    folder.rows(done, folder.evaluation("evaluate-row", done.run_dir / "checkpoints" / "step-000020", 20))
    folder.evaluation("evaluate-loose", done.run_dir / "checkpoints" / "step-000010", 10)
    open_ = folder.run("unfinished", steps=(10,), finished=False, dataset="of-unfinished")
    folder.evaluation("evaluate-unfinished", open_.run_dir / "checkpoints" / "step-000010", 10)
    shutil.copytree(
        open_.run_dir / "checkpoints" / "step-000010", open_.run_dir / "checkpoints" / ".damaged-step-000010-1"
    )
    trunk = folder.run("trunk", steps=(10, 20), finished=True, dataset="of-trunk")
    forked = fork_run(trunk, 10, "forked", folder.settings)
    (forked.run_dir / "finished").touch()
    folder.model("merged-loose-step-9")
    folder.dataset("loose")
    folder.record("resize-loose.json", folder.dataset("loose").model_dump_json())
    for name in ("evaluate-1", "evaluate-2"):
        (data / "jobs" / name).mkdir(parents=True)
        (data / "jobs" / name / "result.json").write_text("{}")
    (data / "datasets" / ".half.host-0.tmp").mkdir()
    (data / "downloads" / "key" / "data").mkdir(parents=True)
    (data / "downloads" / "key" / ".used").touch()
    (data / "compiled" / "inductor" / "x").mkdir(parents=True)
    folder.age(40)
    return folder


def references_load(folder: Folder) -> None:
    """Everything that a run which can be continued, the leaderboard or a fork refers to is whole."""
    for name in ("done", "unfinished", "trunk", "forked"):
        run_dir = folder.settings.runs_dir / name
        assert (run_dir / "experiment.json").exists()
        assert read_origins(run_dir)
    verify_checkpoint(folder.settings.runs_dir / "unfinished" / "checkpoints" / "step-000010")
    verify_checkpoint(folder.settings.runs_dir / "trunk" / "checkpoints" / "step-000010")
    verify_checkpoint(folder.settings.runs_dir / "done" / "checkpoints" / "step-000020")
    done = Run(run_id="done", run_dir=folder.settings.runs_dir / "done", experiment=load_experiment("grpo-geo3k-tiny"))
    for row in evaluations(done):
        assert Path(row.report.table).read_bytes() == BLOCK
    for origin in read_origins(folder.settings.runs_dir / "unfinished"):
        assert (Path(origin.train.path) / "images" / "1.png").read_bytes() == BLOCK
        assert (Path(origin.base.path) / "model.safetensors").read_bytes() == BLOCK


def nothing_is_half_deleted(folder: Folder) -> None:
    """Each checkpoint, dataset, model and evaluation under its own name is whole."""
    for path in folder.settings.runs_dir.glob("*/checkpoints/step-*"):
        verify_checkpoint(path)
    for path in folder.settings.datasets_dir.glob("[!.]*"):
        assert (path / "images" / "1.png").exists()
        assert (path / "report.json").exists()
    for path in folder.settings.models_dir.glob("*"):
        assert (path / "model.safetensors").exists()
        assert (path / "config.json").exists()
    for path in folder.settings.evaluations_dir.glob("*"):
        assert (path / "completions.parquet").exists()
        assert (path / "report.json").exists()


def listing(folder: Folder) -> dict[str, tuple[int, float]]:
    """Every path with its size and time of change."""
    return {
        path.relative_to(folder.data).as_posix(): (path.lstat().st_size, path.lstat().st_mtime)
        for path in sorted(folder.data.rglob("*"))
    }


def delete_versions_without_an_alias(settings: Settings) -> None:
    """As people do with models that they do not want any more."""
    client = MlflowClient(tracking_uri=settings.tracking_uri, registry_uri=settings.tracking_uri)
    for version in registered_versions(settings.tracking_uri):
        if not version.aliases:
            client.delete_model_version(version.name, version.version)


def everything_named_loads(settings: Settings) -> int:
    """Models of the registry, their checkpoints, and the rows of the leaderboard. Returns how many there are."""
    named = 0
    for version in registered_versions(settings.tracking_uri):
        assert (Path(version.tags["rlflow.path"]) / "config.json").exists(), version
        verify_checkpoint(Path(version.tags["rlflow.checkpoint"]))
        named += 1
    for run in all_runs(settings):
        for row in evaluations(run):
            assert Path(row.report.table).exists(), row
            if Path(row.report.policy).parent.name == "checkpoints":
                verify_checkpoint(Path(row.report.policy))
            named += 1
    return named
