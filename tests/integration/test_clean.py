"""clean on a data folder: it removes what nobody needs, whole, and a kill at any moment leaves nothing half deleted."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from mlflow import MlflowClient

from infra import processes
from infra.errors import ServerError, StorageError
from infra.processes import alone
from infra.settings import Settings
from infra.store.bucket import Store
from infra.store.disk import Trash, usage_of
from infra.tracking.models import Pyfunc
from infra.tracking.tracker import Tracker
from rlcore.artifacts import DatasetRef
from rlcore.segment.lease import Lease
from tasks.clean import act
from tasks.clean.act import clean, is_mirrored, look
from tasks.clean.facts import is_alive
from tasks.clean.flow_runs import ended_flow_runs
from tasks.clean.report import CleanReport, json_of, rows_of, text_of
from tasks.cli.clean import clean_here
from tasks.experiments import experiment_values
from tasks.lineage import read_origins
from tasks.run import Driver, append_line
from tasks.store.made import made
from tasks.store.restore import read_mirror, write_mirror
from tests.clean_folder import Folder, listing, make_folder, nothing_is_half_deleted, references_load
from tests.stores import BUCKET, S3, s3_server

GOES = {
    *("runs/done/checkpoints/step-000010", "runs/done/checkpoints/step-000030", "runs/trunk/checkpoints/step-000020"),
    *("runs/forked/checkpoints/step-000010", "runs/unfinished/checkpoints/.damaged-step-000010-1"),
    *(f"runs/{name}/{part}" for name in ("done", "trunk") for part in ("trainer.log", "report", "stacks/hang-1")),
    "runs/unfinished/stacks/hang-1",
    *("datasets/loose", "datasets/of-done", "datasets/of-trunk", "datasets/.half.host-0.tmp"),
    *("models/merged-loose-step-9", "evaluations/evaluate-loose", "jobs/evaluate-1", "jobs/evaluate-2"),
    *("downloads/key", "compiled/inductor/x"),
}
AFTERWARDS = {"made/resize-loose.json", "made/evaluate-loose.json"}  # what they name is gone by then


EXPERIMENTS = experiment_values()


@pytest.fixture(autouse=True)
def _nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary folders of other tests, and prefect.yaml is read once."""
    monkeypatch.setattr("infra.processes.temporary_folders", lambda *_: [])
    monkeypatch.setattr("tasks.clean.facts.experiment_values", lambda: EXPERIMENTS)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return make_folder(tmp_path / "data")


def chosen(report: CleanReport) -> set[str]:
    return {item.item.key for item in report.chosen}


def test_a_look_changes_nothing_and_names_what_nobody_needs(folder: Folder) -> None:
    before = listing(folder)
    assert chosen(look(folder.settings, 30)) == GOES
    assert listing(folder) == before


def test_what_is_younger_stays(folder: Folder) -> None:
    assert chosen(look(folder.settings, 41)) == {"datasets/.half.host-0.tmp"}


@pytest.mark.parametrize("skew_days", [-20, 20])
def test_ages_are_those_of_the_file_system_whatever_the_clock_says(
    folder: Folder, skew_days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + skew_days * 24 * 3600)
    assert chosen(look(folder.settings, 41)) == {"datasets/.half.host-0.tmp"}
    assert chosen(look(folder.settings, 30)) == GOES


def test_it_removes_exactly_that(folder: Folder) -> None:
    before = set(listing(folder))
    report = clean(folder.settings, 30)
    assert chosen(report) == GOES | AFTERWARDS
    gone = before - set(listing(folder))
    assert {path for path in gone if not any(parent in GOES for parent in parents(path))} == GOES | AFTERWARDS
    references_load(folder)
    nothing_is_half_deleted(folder)
    assert not Trash(folder.data).folder.exists()
    assert report.left_bytes == usage_of(folder.data).bytes < report.used_bytes
    assert chosen(clean(folder.settings, 30)) == set()


def parents(path: str) -> list[str]:
    return [parent.as_posix() for parent in Path(path).parents]


def test_records_of_every_run_stay(folder: Folder) -> None:
    clean(folder.settings, 1)
    for name in ("done", "trunk", "forked", "unfinished"):
        assert {"experiment.json", "origins.jsonl"} <= {path.name for path in (folder.data / "runs" / name).iterdir()}
    assert (folder.data / "runs" / "done" / "evaluations.jsonl").exists()
    assert (folder.data / "runs" / "forked" / "fork.json").exists()


def test_a_quota_removes_the_oldest_only_as_far_as_needed(folder: Folder) -> None:
    folder.age(60, folder.data / "models" / "merged-loose-step-9")
    folder.age(50, folder.data / "datasets" / "loose", folder.data / "made" / "resize-loose.json")
    used = usage_of(folder.data).bytes
    within = Settings(data_dir=folder.data, max_gib=used / 2**30 + 1e-6, clean_free_share=0)
    assert chosen(look(within, 30)) == set()
    assert "below its quota" in look(within, 30).summary()
    tight = Settings(data_dir=folder.data, max_gib=(used - 4096) / 2**30, clean_free_share=0)
    assert "4 KiB above its quota" in look(tight, 30).summary()
    roomy = Settings(data_dir=folder.data, max_gib=2 * used / 2**30, clean_free_share=0.5 + 4096 / (2 * used))
    for limited in (tight, roomy):
        assert chosen(look(limited, 30)) == {"models/merged-loose-step-9"}
    assert chosen(clean(tight, 30)) == {"models/merged-loose-step-9"}
    assert usage_of(folder.data).bytes <= tight.max_gib * 2**30


def test_a_shared_checkpoint_frees_its_space_with_its_last_name(folder: Folder) -> None:
    """The fork's files are hard links to the trunk's, so each of them counts half."""
    (whole, shared) = (usage_of(folder.data / "runs" / "trunk" / "checkpoints" / name).bytes
                       for name in ("step-000020", "step-000010"))  # fmt: skip
    assert shared < whole
    linked = usage_of(folder.data / "runs" / "forked" / "checkpoints" / "step-000010").bytes
    both = usage_of(folder.data / "runs").bytes
    shutil.rmtree(folder.data / "runs" / "forked" / "checkpoints" / "step-000010")
    alone = usage_of(folder.data / "runs" / "trunk" / "checkpoints" / "step-000010").bytes
    assert alone == whole
    assert both - usage_of(folder.data / "runs").bytes < linked


def test_what_is_used_meanwhile_is_put_back(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    record = folder.data / "made" / "resize-loose.json"

    def put(trash: Trash, path: Path) -> Path:
        entry = original(trash, path)
        if path.name == "loose":
            record.touch()  # as made() does before it looks at the files
        return entry

    original = Trash.put
    monkeypatch.setattr(Trash, "put", put)
    report = clean(folder.settings, 30)
    assert "datasets/loose" not in chosen(report)
    assert (folder.data / "datasets" / "loose" / "images" / "1.png").exists()
    assert report.notes[-1] == "datasets/loose stays: somebody began to use it."


def test_a_run_that_is_continued_meanwhile_keeps_everything(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = act.take_inventory(folder.settings, 30)
    monkeypatch.setattr(act, "take_inventory", lambda *_: inventory)
    (folder.data / "runs" / "done" / "finished").unlink()
    report = clean(folder.settings, 30)
    assert not [key for key in chosen(report) if key.startswith("runs/done/checkpoints")]


def test_a_second_run_at_once_is_refused(folder: Folder) -> None:
    with alone(folder.settings, "clean"), pytest.raises(StorageError, match="another clean is at work"):
        clean_here(folder.settings, 30, act=True, json=False)


def test_a_link_is_never_followed(folder: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (folder.data / "models" / "linked").symlink_to(outside)
    report = clean(folder.settings, 30)
    assert "models/linked" not in chosen(report)
    assert (outside / "file").read_text() == "mine"


def test_the_table_and_the_json_say_the_same(folder: Folder) -> None:
    report = look(folder.settings, 30)
    data = json.loads(json_of(report))
    goes = {item["path"] for item in data["items"] if item["what"] == "goes"}
    assert goes == GOES
    assert {item["why"] for item in data["items"] if item["path"] == "runs/done/checkpoints/step-000020"} == {
        "the leaderboard names it"
    }
    rows = rows_of(report)
    assert sum(row.number for row in rows) == len(data["items"])
    text = text_of(report)
    assert text.splitlines()[0].split() == ["kind", "number", "size", "oldest", "what", "why"]
    assert text.endswith("Nothing was removed. Remove it with: rlflow clean --yes")
    assert all(row.reason in text for row in rows)


def test_a_use_of_a_dataset_makes_it_young(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that finds its result made does not make it again, and shows that it uses it."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(folder.data))
    found = made("resize-loose", None, lambda: pytest.fail("made again"), DatasetRef)
    assert Path(found.path) == folder.data / "datasets" / "loose"
    assert "datasets/loose" not in chosen(look(folder.settings, 30))


def test_a_run_is_alive_while_its_trainer_or_its_flow_lives(folder: Folder) -> None:
    run_dir = folder.data / "runs" / "unfinished"
    assert not is_alive(run_dir)
    lease = Lease(run_dir / "lease.json")
    lease.acquire("token")
    assert is_alive(run_dir)
    lease.release()
    assert not is_alive(run_dir)
    me = processes.this_process()
    line = Driver(flow_run_id=None, deployed=False, pid=me.pid, started=me.started, host=me.host, at=1.0)
    append_line(run_dir / "drivers.jsonl", line.model_dump_json())
    assert is_alive(run_dir)
    (run_dir / "finished").touch()
    assert not is_alive(run_dir)
    (run_dir / "lease.json").write_text("damaged")
    assert is_alive(run_dir)


def test_a_finished_run_with_a_live_trainer_keeps_everything(folder: Folder) -> None:
    Lease(folder.data / "runs" / "done" / "lease.json").acquire("token")
    assert not [key for key in chosen(clean(folder.settings, 30)) if key.startswith("runs/done/")]


def test_what_a_job_at_work_reads_stays(folder: Folder) -> None:
    checkpoint = folder.data / "runs" / "done" / "checkpoints" / "step-000010"
    job = folder.data / "jobs" / "evaluate-3"
    job.mkdir()
    (job / "spec.json").write_text(json.dumps({"policy": {"path": str(checkpoint)}}))
    assert "runs/done/checkpoints/step-000010" not in chosen(look(folder.settings, 30))
    (job / "result.json").write_text("{}")
    assert "runs/done/checkpoints/step-000010" in chosen(look(folder.settings, 30))


def test_a_log_is_shortened_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "prefect.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    with log.open("ab") as writer:  # as a service holds it
        act._shorten(log, 18)
        writer.write(b"more\n")
    assert log.read_bytes() == b"line 998\nline 999\nmore\n"


def test_the_temporary_folder_of_a_trainer_that_started_meanwhile_stays(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next trainer of a run has the same folder."""
    dead, revived = tmp_path / "rlflow-trainer-dead", tmp_path / "rlflow-trainer-revived"
    for path in (dead, revived):
        path.mkdir()
    folder.age(2, dead, revived)
    looks = iter([[(dead, False), (revived, False)]])
    later = [(dead, False), (revived, True)]
    monkeypatch.setattr("infra.processes.temporary_folders", lambda *_: next(looks, later))
    clean(folder.settings, 30)
    assert (dead.exists(), revived.exists()) == (False, True)


def test_temporary_folders_of_dead_processes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(processes.MARK, raising=False)
    for name in ("rlflow-job-dead", "rlflow-trainer-dead", "rlflow-others", "job-x"):
        (tmp_path / name).mkdir()
    sleeper = processes.start(["sleep", "60"], env=dict(os.environ), mark="job-live", ends_with_parent=True)
    try:
        found = {path.name: lives for path, lives in processes.temporary_folders("trainer-", "job-")}
    finally:
        processes.kill("job-live")
        sleeper.wait()
    assert found == {"rlflow-job-dead": False, "rlflow-trainer-dead": False, "rlflow-job-live": True}


# -- killed


def killed_at(operation: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a forked process that kills itself before its so many-th change of the file system. Returns
    whether it lived that long."""
    child = os.fork()
    if child == 0:
        left = [operation]

        def count(event: str, _: tuple[object, ...]) -> None:
            if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_a_kill_at_any_of_20_random_moments_leaves_nothing_half_deleted(folder: Folder, tmp_path: Path) -> None:
    """Each time on a copy: references load and names are whole right after the kill, and the next clean finishes."""
    moments, draw = 20, random.Random(0)
    operations = 1
    while killed_at(operations, lambda: clean(copy_of(folder, tmp_path).settings, 30)):
        operations *= 2
    killed, left_in_trash = 0, 0
    while killed < moments:
        copy = copy_of(folder, tmp_path)
        if not killed_at(draw.randint(1, operations), lambda copy=copy: clean(copy.settings, 30)):  # type: ignore[misc]
            continue
        killed += 1
        left_in_trash += bool(Trash(copy.data).entries())
        references_load(copy)
        nothing_is_half_deleted(copy)
        clean(copy.settings, 30)
        assert not Trash(copy.data).folder.exists()
        references_load(copy)
        nothing_is_half_deleted(copy)
        assert chosen(look(copy.settings, 30)) == set()
    assert left_in_trash > 0  # some of the moments were in the middle of a removal


def copy_of(folder: Folder, tmp_path: Path) -> Folder:
    """The same folder at a place where its absolute paths still lead: the original is moved away once."""
    origin = tmp_path / "original"
    if not origin.exists():
        folder.data.rename(origin)
    shutil.rmtree(folder.data, ignore_errors=True)
    shutil.copytree(origin, folder.data)
    return folder


# -- the copies in the store


@pytest.mark.parametrize(
    ("key", "mirrored"),
    [
        ("datasets/d", True),
        ("models/merged-a-step-1", True),
        ("evaluations/e", True),
        ("runs/a/checkpoints/step-000010", True),
        ("runs/a/checkpoints/.damaged-step-000010-1", False),
        ("runs/a/trainer.log", True),
        ("runs/a/report", True),
        ("runs/a/stacks/hang-1", False),
        ("jobs/j", False),
        ("compiled/inductor/x", False),
    ],
)
def test_what_the_store_has_copies_of(key: str, mirrored: bool) -> None:
    assert is_mirrored(key) is mirrored


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server
        s3fs.S3FileSystem.clear_instance_cache()


def test_the_copies_in_the_store_go_as_well(folder: Folder, s3: S3, tmp_path: Path) -> None:
    settings = Settings(data_dir=folder.data, store=f"s3://{BUCKET}/clean")
    store = Store(settings.store)
    ours, others = folder.data / "runs" / "done", folder.data / "runs" / "trunk"
    for path in ("datasets/loose", "datasets/of-unfinished", "runs/done/checkpoints/step-000010",
                 "runs/done/checkpoints/step-000020", "runs/trunk/checkpoints/step-000020"):  # fmt: skip
        store.push(folder.data / path, path)
    store.put("runs/done/trainer.log", b"log")
    for run_dir, holder in ((ours, None), (others, b"another machine")):
        state = read_mirror(run_dir, settings)
        write_mirror(run_dir, state)
        store.put(f"runs/{run_dir.name}/.holder", holder or state.token.encode())
    clean(settings, 30)
    assert store.sealed("datasets/loose") is None
    assert store.files_below("datasets/loose") == []
    assert store.sealed("datasets/of-unfinished") is not None
    assert store.sealed("runs/done/checkpoints/step-000010") is None
    assert store.sealed("runs/done/checkpoints/step-000020") is not None  # in the leaderboard
    assert store.get("runs/done/trainer.log") is None
    assert store.sealed("runs/trunk/checkpoints/step-000020") is not None  # another machine drives that run now
    assert not (folder.data / "runs" / "trunk" / "checkpoints" / "step-000020").exists()


def test_a_store_that_is_away_gets_its_turn_at_the_next_clean(
    folder: Folder, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=folder.data, store=f"s3://{BUCKET}/away")
    Store(settings.store).push(folder.data / "datasets" / "loose", "datasets/loose")

    def away(store: Store, key: str) -> None:
        raise StorageError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", away)
        patch.setattr(Store, "discard", away)
        report = clean(settings, 30)
    assert "the copy of datasets/loose in the store stays until the next clean: no answer" in report.notes
    assert not (folder.data / "datasets" / "loose").exists()
    assert {Trash(folder.data).key(entry) for entry in Trash(folder.data).entries()} >= {"datasets/loose"}
    assert not list(Trash(folder.data).folder.glob("*/*"))  # its space is free
    assert Store(settings.store).sealed("datasets/loose") is not None
    clean(settings, 30)
    assert Store(settings.store).sealed("datasets/loose") is None
    assert not Trash(folder.data).folder.exists()


# -- MLflow's registry and Prefect


def test_a_registered_model_keeps_what_it_came_from(folder: Folder, tmp_path: Path) -> None:
    """By MLflow's own database. A deleted version keeps nothing but the records."""
    model = folder.model("merged-done-step-30")
    done = folder.data / "runs" / "done"
    tracker = Tracker.open(
        uri=folder.settings.tracking_uri, artifacts_uri=folder.settings.artifacts_uri, experiment="grpo-geo3k-tiny",
        run_id="done", run_dir=done,
    )  # fmt: skip
    tags = {"rlflow.run_id": "done", "rlflow.checkpoint": str(done / "checkpoints" / "step-000030")}
    files = tmp_path / "loader"
    files.mkdir()
    loader = Pyfunc("tests.echo_model", files, {}, {"question": "?"}, {"seed": 0}, ["mlflow"])
    words: dict[str, Any] = {"name": "grpo-geo3k-tiny", "tags": tags, "description": "d", "pyfunc": loader}
    version = tracker.register_model(path=Path(model.path), alias="champion", **words).version
    folder.age(40, folder.data / "models")
    kept = {
        "models/merged-done-step-30", "runs/done/checkpoints/step-000030", "datasets/of-done", "models/tiny-base",
        "runs/done/report",
    }  # fmt: skip
    clean(folder.settings, 30)
    assert all((folder.data / key).exists() for key in kept)
    assert not (folder.data / "runs" / "done" / "checkpoints" / "step-000010").exists()
    client = MlflowClient(tracking_uri=folder.settings.tracking_uri, registry_uri=folder.settings.tracking_uri)
    client.delete_registered_model_alias("grpo-geo3k-tiny", "champion")
    client.delete_model_version("grpo-geo3k-tiny", version)
    clean(folder.settings, 30)
    assert [key for key in sorted(kept) if (folder.data / key).exists()] == ["models/tiny-base"]  # of "unfinished"
    assert read_origins(done)


def test_a_run_that_another_mlflow_holds_keeps_what_its_registry_may_name(folder: Folder) -> None:
    state = {"uri": "http://elsewhere:5000", "mlflow_run_id": "0" * 32, "published_step": 0}
    (folder.data / "runs" / "done" / "mlflow.json").write_text(json.dumps(state))
    assert not {key for key in chosen(look(folder.settings, 30)) if "checkpoints/step" in key or "models/" in key}


def test_nothing_goes_while_mlflow_does_not_answer(folder: Folder, refusing_port: int) -> None:
    settings = Settings(data_dir=folder.data, mlflow_uri=f"http://127.0.0.1:{refusing_port}")
    before = listing(folder)
    with pytest.raises(ServerError, match="no MLflow server answers"):
        clean(settings, 30)
    assert listing(folder) == before


def test_old_flow_runs_go_except_those_of_runs_that_can_be_continued(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Prefect's own server. A driver's flow run is what recover looks up."""
    from prefect import flow, get_client
    from prefect.testing.utilities import prefect_test_harness

    @flow
    def tiny() -> None:
        pass

    with prefect_test_harness(server_startup_timeout=120):
        names = [str(tiny(return_state=True).state_details.flow_run_id) for _ in range(2)]
        driver = {"flow_run_id": names[0], "deployed": True, "pid": 2**22, "started": 1.0, "host": "h", "at": 1.0}
        append_line(folder.data / "runs" / "unfinished" / "drivers.jsonl", json.dumps(driver))
        ended = list(ended_flow_runs(0))
        assert {name for name, _ in ended} == set(names)
        assert list(ended_flow_runs(1)) == []
        monkeypatch.setattr(act, "ended_flow_runs", lambda _: [(name, at - 40 * 86400) for name, at in ended])
        report = clean(folder.settings, 30)
        assert [key for key in names if key in chosen(report)] == [names[1]]
        with get_client(sync_client=True) as client:
            assert [str(run.id) for run in client.read_flow_runs()] == [names[0]]


def test_a_folder_that_was_moved_keeps_what_its_records_name(folder: Folder, tmp_path: Path) -> None:
    """Records hold absolute paths of where the folder was."""
    moved = folder.data.rename(tmp_path / "elsewhere")
    assert chosen(look(Settings(data_dir=moved), 30)) == GOES
