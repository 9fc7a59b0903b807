"""Checkpoints in the background, and where a trainer finds itself after its files were damaged."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import build_experiment
from rlcore.data.probe import Probe
from rlcore.errors import CheckpointError, DivergedError, LeaseLostError, StorageError
from rlcore.files import write_json_atomically
from rlcore.models.checkpoint import BackgroundSaver
from rlcore.rollout.state import RolloutState
from rlcore.segment import checkpointing
from rlcore.segment.checkpointing import Checkpointer
from rlcore.segment.journal import CheckpointSeconds, MetricJournal, read_journal
from rlcore.segment.lease import Lease
from rlcore.segment.resume import ResumePoint, find_resume_point, warn_of_changes
from rlcore.segment.spec import SegmentEnd, SegmentManifest, SegmentSpec, segment_path
from rlcore.segment.store import MANIFEST, LocalCheckpointStore, read_manifest
from rlcore.training.run import TrainState
from tasks.driver.health import HangWatch

SHARD = b"weights of all ranks " * 100


class SlowPolicy:
    """Writes its shard when it is told that it may."""

    def __init__(self, *, held: bool = False) -> None:
        self.may_write = threading.Event()
        self.folders: list[Path] = []
        self.error: Exception | None = None
        self.released = False
        if not held:
            self.may_write.set()

    @contextmanager
    def samplers_released(self) -> Iterator[None]:
        self.released = True
        yield
        self.released = False

    def begin_save(self, folder: Path) -> None:
        assert self.released, "the weights are copied while a sampler may hold the memory"
        self.folders.append(folder)

    def saved(self) -> bool:
        if not self.may_write.is_set():
            return False
        if self.error is not None:
            raise self.error
        shard = self.folders[-1] / "train_state" / "__0_0.distcp"
        shard.parent.mkdir(exist_ok=True)
        shard.write_bytes(SHARD)
        return True

    def probe_logprobs(self, samples: object) -> list[object]:
        assert self.released, "the probe is computed while a sampler may hold the memory"
        return []


class Trainer:
    """A run's folder with what a trainer has around its checkpoints; ``held``: the workers do not finish writing."""

    def __init__(self, run_dir: Path, *, held: bool = False, lease: Lease | None = None, **segment: object) -> None:
        values = {
            "name": "toy",
            "training": {"problems_per_batch": 1, "steps": 100},
            "segment": {"steps": 2, **segment},
        }
        self.spec = SegmentSpec(
            run_id="run",
            run_dir=run_dir,
            experiment=build_experiment(values),
            dataset=DatasetRef(
                path="d", digest="d", source="s", num_problems=1, num_rejected=0, num_images=0, max_prompt_tokens=1
            ),
            model=ModelRef(path="m", digest="m", source="s", num_parameters=1),
        )
        self.run_dir = run_dir
        self.policy = SlowPolicy(held=held)
        self.seconds = CheckpointSeconds()
        self.renewals: list[Exception] = []  # what the next renewals of the lease raise
        self.store = LocalCheckpointStore(run_dir, "run")
        self.start = find_resume_point(run_dir, self.store)
        self.checkpoints = Checkpointer(
            self.spec,
            self.store,
            self.policy,
            Probe(()),
            start=self.start,
            seconds=self.seconds,
            lease=self if lease is None else lease,
            records=partial(read_journal, run_dir / "journal.jsonl"),
        )

    def renew(self, *, progress: bool = True) -> None:
        if self.renewals:
            raise self.renewals[0]

    def begin(self, segment: int, *, complete: bool = True, step: int | None = None) -> None:
        step = 2 * segment + 2 if step is None else step
        self.checkpoints.begin(TrainState(step=step), SegmentEnd(segment, 2 * segment, complete))

    def train(self, segments: int, rewards: Callable[[int], float] = float) -> None:
        journal = MetricJournal(self.run_dir / "journal.jsonl")
        for segment in range(segments):
            for step in (2 * segment + 1, 2 * segment + 2):
                journal.step(step, {"reward/mean": rewards(segment)})
            self.begin(segment)
            self.checkpoints.finish()

    def manifest(self, segment: int) -> SegmentManifest | None:
        path = segment_path(self.run_dir, segment)
        return SegmentManifest.model_validate_json(path.read_text()) if path.exists() else None

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())


@pytest.fixture
def trained(tmp_path: Path) -> Trainer:
    """Three segments of two steps each."""
    trainer = Trainer(tmp_path, keep_checkpoints=3)
    with trainer.checkpoints:
        trainer.train(3)
    return trainer


def test_the_trainer_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, held=True)
    with trainer.checkpoints:
        trainer.begin(0)
        trainer.checkpoints.check()
        assert trainer.names() == [".staging-step-000002"]
        assert trainer.manifest(0) is None
        assert trainer.seconds.blocked > 0
        assert trainer.seconds.written == 0
        trainer.policy.may_write.set()
    assert trainer.names() == ["step-000002"]
    manifest = trainer.manifest(0)
    assert manifest is not None
    assert (manifest.first_step, manifest.last_step, manifest.complete) == (0, 2, True)
    trainer.store.verify(manifest.checkpoint)
    written = trainer.seconds.take()
    assert written["time/checkpoint_written"] > 0
    assert trainer.seconds.take() == {"time/checkpoint_blocked": 0.0, "time/checkpoint_written": 0.0}


def test_the_next_checkpoint_waits_for_the_one_under_way(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, held=True)
    with trainer.checkpoints:
        trainer.begin(0)
        threading.Timer(0.1, trainer.policy.may_write.set).start()
        trainer.begin(1)
        assert trainer.manifest(0) is not None
    assert trainer.manifest(1) is not None
    assert len(trainer.policy.folders) == 2


def test_an_error_of_the_background_is_raised_at_the_next_safe_point(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.policy.error = StorageError("no space left")

    def train_on() -> None:
        with trainer.checkpoints:
            trainer.begin(0)
            while True:
                trainer.checkpoints.check()

    with pytest.raises(StorageError, match="no space left"):
        train_on()
    assert trainer.manifest(0) is None


def test_a_trainer_that_fails_commits_what_is_under_way_first(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    def diverge() -> None:
        with trainer.checkpoints:
            trainer.begin(0)
            raise DivergedError("nan")

    with pytest.raises(DivergedError):
        diverge()
    assert trainer.manifest(0) is not None


def test_a_trainer_that_lost_its_lease_commits_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, held=True)

    def lose() -> None:
        with trainer.checkpoints:
            trainer.begin(0)
            trainer.renewals.append(LeaseLostError("another one"))
            trainer.checkpoints.finish()

    with pytest.raises(LeaseLostError):
        lose()
    assert trainer.names() == [".staging-step-000002"]
    assert trainer.manifest(0) is None


def test_the_lease_is_asked_again_after_the_workers_have_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, held=True)

    def lose_later() -> None:
        with trainer.checkpoints:
            trainer.begin(0)
            trainer.renewals.append(LeaseLostError("another one"))
            trainer.policy.may_write.set()

    with pytest.raises(LeaseLostError):
        lose_later()
    assert trainer.names() == [".staging-step-000002"]


class Waiting:
    """A trainer that waits for its checkpoint, and its driver, whose clock the test sets."""

    def __init__(self, run_dir: Path, policy: SlowPolicy) -> None:
        self.lease = Lease(run_dir / "lease.json")
        self.lease.acquire("t")
        self.trainer = Trainer(run_dir, held=True, lease=self.lease)
        self.policy = self.trainer.policy = self.trainer.checkpoints._policy = policy
        self.now = 0.0
        self.watch = HangWatch(run_dir / "lease.json", 1.0, now=lambda: self.now)

    def renewals(self, count: int) -> None:
        """Wait until the lease has been renewed so many times."""
        for _ in range(count):
            before = self.lease.read()
            while self.lease.read() == before:
                time.sleep(0.001)

    def stuck_after(self, seconds: float) -> bool:
        self.renewals(3)
        self.watch.stuck()  # it looks every second
        self.now += seconds
        self.renewals(3)
        return self.watch.stuck()

    @contextmanager
    def at_it(self) -> Iterator[None]:
        """Ends the wait on leaving, with what the checkpoint's own error is."""
        with ThreadPoolExecutor(1) as pool, self.trainer.checkpoints:
            self.trainer.begin(0)
            finished = pool.submit(self.trainer.checkpoints.finish)
            try:
                yield
            finally:
                self.policy.may_write.set()
            finished.result()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_RENEW_SECONDS", 0.01)


def test_a_write_that_hangs_is_a_hang_though_the_lease_is_renewed(tmp_path: Path, often: None) -> None:
    waiting = Waiting(tmp_path, SlowPolicy(held=True))
    with waiting.at_it():
        assert waiting.stuck_after(61)
    assert waiting.trainer.manifest(0) is not None


def test_a_slow_write_that_goes_on_is_no_hang(tmp_path: Path, often: None) -> None:
    waiting = Waiting(tmp_path, SlowPolicy(held=True))
    with waiting.at_it():
        shard = waiting.policy.folders[0] / "another rank's share"
        for _ in range(5):
            with shard.open("ab") as file:
                file.write(b"a few bytes")
            assert not waiting.stuck_after(50)
        assert waiting.stuck_after(61)


def test_a_checkpoint_that_cannot_even_be_opened_is_a_hang(tmp_path: Path, often: None) -> None:
    """The real saver, at a disk whose open() does not come back."""

    class TorchPolicy(SlowPolicy):
        saver = BackgroundSaver()

        def begin_save(self, folder: Path) -> None:
            model = torch.nn.Linear(4, 4)
            (folder / "train_state").mkdir()
            os.mkfifo(folder / "train_state" / "__0_0.distcp")
            self.folders.append(folder)
            self.saver.begin(model, torch.optim.AdamW(model.parameters()), folder)

        def saved(self) -> bool:
            return self.saver.done()

    waiting = Waiting(tmp_path, TorchPolicy())

    def wait_at_a_disk_that_comes_back_broken() -> None:
        with waiting.at_it():
            try:
                assert waiting.stuck_after(61)
            finally:
                (waiting.policy.folders[0] / "train_state" / "__0_0.distcp").open("rb").close()

    with pytest.raises(StorageError, match="rank 0 could not write its part"):
        wait_at_a_disk_that_comes_back_broken()


def test_hashing_a_large_checkpoint_is_progress(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    seen = [trainer.store.bytes_done()]
    with trainer.checkpoints:
        trainer.begin(0)
        trainer.checkpoints.finish()
    seen.append(trainer.store.bytes_done())
    trainer.store.verify(tmp_path / "checkpoints" / "step-000002")
    seen.append(trainer.store.bytes_done())
    assert len(set(seen)) == 3


def test_without_a_step_since_the_last_checkpoint_nothing_is_written(trained: Trainer) -> None:
    again = Trainer(trained.run_dir)
    with again.checkpoints:
        again.begin(3, complete=False, step=6)
    assert again.policy.folders == []
    stopped = again.manifest(3)
    assert stopped is not None
    assert (stopped.first_step, stopped.last_step, stopped.complete, stopped.checkpoint.step) == (6, 6, False, 6)
    assert Trainer(trained.run_dir).start.segment == 3


def test_a_run_goes_on_from_its_newest_checkpoint(trained: Trainer) -> None:
    start = Trainer(trained.run_dir).start
    assert (start.segment, start.first_step, start.step) == (3, 6, 6)
    assert Trainer(trained.run_dir / "new").start == ResumePoint(0, 0, None)


def test_a_segment_that_was_stopped_is_gone_on_with(trained: Trainer) -> None:
    again = Trainer(trained.run_dir)
    with again.checkpoints:
        again.begin(3, complete=False, step=7)
    start = Trainer(trained.run_dir).start
    assert (start.segment, start.first_step, start.step) == (3, 6, 7)


def _truncated(folder: Path) -> None:
    (folder / "train_state" / "__0_0.distcp").write_bytes(SHARD[:-1])


def _bit_flipped(folder: Path) -> None:
    (folder / "train_state" / "__0_0.distcp").write_bytes(bytes([SHARD[0] ^ 1]) + SHARD[1:])


def _file_missing(folder: Path) -> None:
    (folder / "train_state" / "__0_0.distcp").unlink()


def _manifest_damaged(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"segment": 2', '"segment": 1'))  # whole in itself: the ref tells


def _half_uploaded(folder: Path) -> None:
    (folder / MANIFEST).unlink()


DAMAGES = [_truncated, _bit_flipped, _file_missing, _manifest_damaged, _half_uploaded]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_moved_aside_aloud_and_the_one_before_used(
    trained: Trainer, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(trained.run_dir / "checkpoints" / "step-000006")
    with caplog.at_level(logging.WARNING):
        trainer = Trainer(trained.run_dir)
    assert (trainer.start.segment, trainer.start.first_step, trainer.start.step) == (2, 4, 4)
    assert trainer.names() == [".damaged-step-000006-1", "step-000002", "step-000004"]
    assert trainer.manifest(2) is None
    assert (trained.run_dir / "segments" / ".damaged-0002.json-1").exists()
    assert "A DAMAGED CHECKPOINT IS MOVED ASIDE to .damaged-step-000006-1" in caplog.text
    assert "SEGMENT 2 IS NO LONGER DONE" in caplog.text
    assert "training goes on from step 4" in caplog.text

    with trainer.checkpoints:  # the replay commits under the same names
        trainer.begin(2)
    assert Trainer(trained.run_dir).start.step == 6


def test_what_was_staged_is_never_a_checkpoint(trained: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    folder = trained.run_dir / "checkpoints"
    shutil.copytree(folder / "step-000006", folder / ".staging-step-000008")
    assert Trainer(trained.run_dir).start.step == 6
    assert "A HALF WRITTEN CHECKPOINT was left" in caplog.text


@pytest.mark.parametrize("folder", ["segments", "trained", "samples"])
def test_a_small_file_that_a_killed_trainer_was_writing_is_removed(
    trained: Trainer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    path = trained.run_dir / folder / "step-000008.json"
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            write_json_atomically(path, "{}")
    assert len(list(path.parent.glob(".*.tmp"))) == 1
    assert Trainer(trained.run_dir).start.step == 6
    assert not list(path.parent.glob(".*.tmp"))


def test_with_every_checkpoint_damaged_the_run_starts_from_the_initial_model(
    trained: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    for number, folder in enumerate(sorted((trained.run_dir / "checkpoints").iterdir())):
        DAMAGES[number](folder)
    assert Trainer(trained.run_dir).start == ResumePoint(0, 0, None)
    assert caplog.text.count("training goes on from the initial model") == 3
    assert [trained.manifest(segment) for segment in range(3)] == [None] * 3


def test_a_lost_folder_takes_its_segment_back(trained: Trainer) -> None:
    shutil.rmtree(trained.run_dir / "checkpoints" / "step-000006")
    assert Trainer(trained.run_dir).start.step == 4
    assert trained.manifest(2) is None


def test_an_empty_folder_of_checkpoints_is_a_disk_that_is_away(trained: Trainer) -> None:
    """To begin again from the initial model would throw away what lies on it."""
    folder = trained.run_dir / "checkpoints"
    folder.rename(trained.run_dir / "away")
    folder.mkdir()
    with pytest.raises(StorageError, match=r"step 6 is committed, and its folder checkpoints is empty. Mount"):
        Trainer(trained.run_dir)
    folder.rmdir()
    (trained.run_dir / "away").rename(folder)
    assert Trainer(trained.run_dir).start.step == 6


def test_a_checkpoint_committed_just_before_the_kill_gets_its_manifest(trained: Trainer) -> None:
    expected = trained.manifest(2)
    segment_path(trained.run_dir, 2).unlink()
    assert Trainer(trained.run_dir).start.segment == 3
    assert trained.manifest(2) == expected


def test_a_damaged_segment_manifest_is_made_again_from_the_checkpoint(
    trained: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained.manifest(2)
    segment_path(trained.run_dir, 2).write_text('{"run_id": "run"')
    assert Trainer(trained.run_dir).start.segment == 3
    assert trained.manifest(2) == expected
    assert "A DAMAGED SEGMENT MANIFEST IS MOVED ASIDE" in caplog.text


def test_a_run_whose_folder_was_moved_goes_on(trained: Trainer, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained.run_dir, moved, ignore=shutil.ignore_patterns("moved"))
    shutil.rmtree(trained.run_dir / "checkpoints")
    start = Trainer(moved).start
    assert start.checkpoint is not None
    assert start.checkpoint.path == str(moved / "checkpoints" / "step-000006")


def test_another_run_s_checkpoint_is_refused_and_not_touched(trained: Trainer) -> None:
    with pytest.raises(CheckpointError, match="belongs to run 'run', expected 'other'"):
        find_resume_point(trained.run_dir, LocalCheckpointStore(trained.run_dir, "other"))
    assert trained.names() == ["step-000002", "step-000004", "step-000006"]


def test_other_code_and_another_experiment_are_logged_with_both_digests(
    trained: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = trained.manifest(2).checkpoint
    warn_of_changes(trained.spec, checkpoint)
    assert not caplog.records
    path = Path(checkpoint.path) / MANIFEST
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "code_digest": "0123456789abcdef", "experiment_digest": "other"}))
    warn_of_changes(trained.spec, checkpoint)
    code, results = old["code_digest"], trained.spec.experiment.results_digest()
    assert f"another code of rlcore: it was 0123456789abcdef up to step 6, and it is {code}" in caplog.text
    assert f"another experiment: it was other up to step 6, and it is {results}" in caplog.text


def test_a_checkpoint_says_all_that_its_segment_does(trained: Trainer) -> None:
    written = read_manifest(trained.run_dir / "checkpoints" / "step-000006")
    assert (written.segment, written.first_step, written.complete) == (2, 4, True)
    assert (written.dataset_digest, written.model_digest) == ("d", "m")
    assert len(written.code_digest) == 16


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep_checkpoints": 1}, [5]),
        ({"keep_checkpoints": 2}, [4, 5]),
        ({"keep_checkpoints": 1, "keep_every": 2}, [1, 3, 5]),
        ({"keep_checkpoints": 1, "keep_best": 2}, [1, 3, 5]),
        ({"keep_checkpoints": 1, "keep_best": 1, "best_metric": "no/such"}, [5]),
    ],
)
def test_latest_best_and_every_k_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, object], left: list[int]
) -> None:
    rewards = [0.1, 0.9, 0.3, 0.8, 0.2, 0.4]
    trainer = Trainer(tmp_path, **settings)
    with trainer.checkpoints:
        trainer.train(6, rewards.__getitem__)
    assert trainer.names() == [f"step-{2 * segment + 2:06d}" for segment in left]
    assert ("journaled no such metric" in caplog.text) == ("best_metric" in settings)


def test_nothing_goes_before_its_successor_is_whole(trained: Trainer) -> None:
    trainer = Trainer(trained.run_dir, keep_checkpoints=1)
    commit = trainer.store.commit

    def damaged_at_once(staging: Path, **facts: object) -> object:
        checkpoint = commit(staging, **facts)
        _bit_flipped(Path(checkpoint.path))
        return checkpoint

    trainer.store.commit = damaged_at_once  # type: ignore[method-assign]
    with trainer.checkpoints:
        trainer.begin(3)
    assert trainer.names() == ["step-000006", "step-000008"]  # of the older ones the newest whole one stays
    assert Trainer(trained.run_dir).start.step == 6


def test_the_state_is_what_training_had_at_begin(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, held=True)
    state = TrainState(step=2, kl_coefficient=0.5, rollouts=RolloutState(problems_seen=8))
    with trainer.checkpoints:
        trainer.checkpoints.begin(state, SegmentEnd(0, 0, complete=True))
        state = replace(state, step=3, rollouts=RolloutState(problems_seen=12))
        trainer.policy.may_write.set()
    folder = tmp_path / "checkpoints" / "step-000002"
    loaded = TrainState.load(folder, trainer.store.read_state(folder), [], mask_truncated=False)
    assert (loaded.step, loaded.rollouts.problems_seen, loaded.kl_coefficient) == (2, 8, 0.5)
