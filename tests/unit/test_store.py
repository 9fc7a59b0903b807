import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.artifacts import CheckpointRef
from rlcore.errors import CheckpointError
from rlcore.segment.spec import SegmentEnd
from rlcore.segment.store import (
    MANIFEST,
    LocalCheckpointStore,
    verify_checkpoint,
)

DATA = b"weights of all ranks " * 100


def _commit(store: LocalCheckpointStore, step: int, state: dict | None = None, **changes) -> CheckpointRef:
    staging = store.stage(step)
    (staging / "train_state").mkdir()
    (staging / "train_state" / "__0_0.distcp").write_bytes(DATA)
    (staging / "train_state" / ".metadata").write_bytes(b"hidden files count as well")
    values = {
        "end": SegmentEnd(step // 20, step - 20, complete=True),
        "experiment_digest": "exp",
        "dataset_digest": "data",
        "model_digest": "model",
    }
    return store.commit(staging, step=step, trainer_state=state or {"step": step}, **(values | changes))


@pytest.fixture
def store(tmp_path):
    return LocalCheckpointStore(tmp_path, "run")


def _shard(ref: CheckpointRef) -> Path:
    return Path(ref.path) / "train_state" / "__0_0.distcp"


def test_commit_gives_a_whole_checkpoint_under_its_final_name(store, tmp_path):
    assert store.latest() is None
    ref = _commit(store, 20, {"step": 20, "rng": [1, 2]})
    assert ref == store.latest()
    assert Path(ref.path) == tmp_path / "checkpoints" / "step-000020"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000020"]
    manifest = store.verify(ref)
    assert set(manifest.files) == {"state.json", "train_state/.metadata", "train_state/__0_0.distcp"}
    assert manifest.files["train_state/__0_0.distcp"].size == len(DATA)
    assert manifest.versions["torch"]
    assert (manifest.step, manifest.policy_version, manifest.segment) == (20, 20, 1)
    assert store.read_state(ref) == {"step": 20, "rng": [1, 2]}


def _truncate(path: Path) -> None:
    path.write_bytes(DATA[:-1])


def _flip_one_bit(path: Path) -> None:
    path.write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_truncate, f"found {len(DATA) - 1} bytes, expected {len(DATA)} bytes"),
        (_flip_one_bit, "found SHA-256"),
        (Path.unlink, "found no such file"),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_skipped_aloud(store, caplog, damage, found):
    older, newer = _commit(store, 20), _commit(store, 40)
    damage(_shard(newer))
    with pytest.raises(CheckpointError, match=f"train_state/__0_0.distcp: {found}"):
        store.verify(newer)
    assert store.latest() == older
    assert "step-000040 is damaged at train_state/__0_0.distcp" in caplog.text


def test_a_changed_manifest_is_found_through_the_ref(store):
    ref = _commit(store, 20)
    manifest = Path(ref.path) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"segment": 1', '"segment": 2'))
    verify_checkpoint(Path(ref.path))  # consistent in itself
    with pytest.raises(CheckpointError, match="manifest.json"):
        store.verify(ref)


@pytest.mark.parametrize("text", [None, "", '{"run_id": "run"}'])
def test_a_missing_or_half_manifest_is_damage(store, text):
    ref = _commit(store, 20)
    manifest = Path(ref.path) / MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(CheckpointError, match="manifest.json"):
        store.verify(Path(ref.path))
    assert store.latest() is None


def test_half_staged_folders_are_no_checkpoints_and_go_with_the_next_attempt(store, tmp_path):
    (store.stage(20) / "part").write_bytes(b"x")
    assert store.latest() is None
    (tmp_path / "checkpoints" / ".staging-step-000010").mkdir()
    staging = store.stage(20)
    assert list(staging.iterdir()) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".staging-step-000020"]


def test_a_replayed_commit_returns_the_first_ref(store, tmp_path):
    first = _commit(store, 20)
    assert _commit(store, 20) == first
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000020"]


def test_a_replay_over_a_damaged_step_moves_it_aside(store, tmp_path):
    for number in (1, 2):
        _truncate(_shard(_commit(store, 20)))
        ref = _commit(store, 20)
        store.verify(ref)
        assert (tmp_path / "checkpoints" / f".damaged-step-000020-{number}").is_dir()


@pytest.mark.parametrize("change", [{"experiment_digest": "other"}, {"dataset_digest": "other"}])
def test_a_step_of_another_experiment_is_never_taken_for_a_replay(store, change):
    _commit(store, 20)
    with pytest.raises(CheckpointError, match="another experiment"):
        _commit(store, 20, **change)


def test_a_checkpoint_of_another_run_is_refused(store, tmp_path):
    ref = _commit(store, 20)
    other = LocalCheckpointStore(tmp_path, "other")
    for attempt in (other.latest, lambda: other.verify(ref), lambda: _commit(other, 20)):
        with pytest.raises(CheckpointError, match="belongs to run 'run', expected 'other'"):
            attempt()


def test_the_newest_is_by_number_not_by_name(store):
    _commit(store, 999_999)
    assert _commit(store, 1_000_000) == store.latest()


def _steps(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_prune_keeps_the_newest_and_the_pinned(store, tmp_path):
    refs = [_commit(store, step) for step in (20, 40, 60, 80)]
    removed = store.prune(2, pinned=[refs[0].path])
    assert [path.name for path in removed] == ["step-000040"]
    assert _steps(tmp_path) == ["step-000020", "step-000060", "step-000080"]
    assert store.prune(1, pinned=["step-000020", refs[2].path]) == []
    assert store.prune(1, pinned=["step-000060"]) == [tmp_path / "checkpoints" / "step-000020"]
    with pytest.raises(ValueError, match="at least one"):
        store.prune(0)


def test_prune_counts_only_whole_checkpoints_as_kept(store, tmp_path):
    refs = [_commit(store, step) for step in (20, 40, 60)]
    _flip_one_bit(_shard(refs[2]))
    assert store.prune(1) == [Path(refs[0].path)]
    assert store.latest() == refs[1]
    _truncate(_shard(refs[1]))  # verified a moment ago by this very store
    assert store.prune(1) == []
    assert _steps(tmp_path) == ["step-000040", "step-000060"]


def test_state_is_json_and_exact(store):
    state = {"tenth": 0.1, "big": 2**64, "text": "ä"}
    assert store.read_state(_commit(store, 20, state)) == state


def test_the_segment_files_load_without_torch():
    modules = "rlcore.segment.resume, rlcore.segment.lease"
    code = f"import sys, json, {modules}; print(json.dumps([m for m in ('torch', 'ray') if m in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
