"""Folders in a bucket, of moto over http and of OpenStack Swift over TLS: whole or absent, whoever is killed when."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
import s3fs

from infra.errors import StorageAwayError, StorageError, StorageRefusedError
from infra.store.bucket import SEAL, FileEntry, Seal, Store
from tests.shell import new_shell
from tests.stores import BUCKET, S3, Plug, open_uploads, s3_server, warnings_of_tries
from tests.swift import Swift, swift_server

MIB = 2**20
PART = 5 * MIB  # the least that S3 takes


MOTO, SWIFT = "moto", "swift over TLS"


@pytest.fixture(scope="module", params=[MOTO, SWIFT])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    folder = tmp_path_factory.mktemp("s3")
    serve = s3_server(folder / "log") if request.param == MOTO else swift_server(folder)
    with serve as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(autouse=True)
def _no_client_of_another_test(s3: S3) -> Iterator[None]:
    """s3fs keeps a client by its arguments, which do not say what the environment was."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def place_of(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name).strip("-")


@pytest.fixture
def store(s3: S3, request: pytest.FixtureRequest) -> Store:
    return Store(f"s3://{BUCKET}/{place_of(request)}", part_bytes=PART, retries=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One small file, and one that is sent in three parts."""
    folder = tmp_path / "step-000004"
    (folder / "train_state").mkdir(parents=True)
    (folder / "state.json").write_text('{"step": 4}')
    (folder / "train_state" / "__0_0.distcp").write_bytes(os.urandom(3 * PART))
    os.utime(folder / "state.json", (1_700_000_000.5, 1_700_000_000.5))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_pushed_comes_back_as_it_was(store: Store, s3: S3, folder: Path, tmp_path: Path) -> None:
    store.push(folder, "runs/a/step-000004")
    assert (
        s3.files()
        .info(f"{BUCKET}/{store.uri.rpartition('/')[2]}/runs/a/step-000004/train_state/__0_0.distcp")["ETag"]
        .endswith('-3"')
    ), "sent in three parts"
    steps: list[tuple[int, int]] = []
    assert store.pull("runs/a/step-000004", tmp_path / "back", progress=lambda done, of: steps.append((done, of)))
    assert contents(tmp_path / "back") == contents(folder)
    assert (tmp_path / "back" / "state.json").stat().st_mtime == 1_700_000_000.5
    assert steps[-1] == (3 * PART + 11, 3 * PART + 11)
    assert store.sealed_below("runs/a") == ["step-000004"]
    assert not store.pull("runs/a/step-000008", tmp_path / "none")
    assert not list(tmp_path.glob(".*"))


def test_other_content_replaces_what_is_there_and_the_same_is_not_sent_again(
    store: Store, s3: S3, folder: Path, tmp_path: Path
) -> None:
    store.push(folder, "key")
    large = f"{store.uri.removeprefix('s3://')}/key/train_state/__0_0.distcp"
    before = s3.files().info(large)["LastModified"]
    probe = f"{BUCKET}/{store.uri.rpartition('/')[2]}/probe"
    while not s3.files().exists(probe) or s3.files().info(probe)["LastModified"] == before:
        s3.files().pipe_file(probe, b"")  # the server's clock has whole seconds: what is sent now is seen to be later
    (folder / "state.json").rename(folder / "other.json")
    store.push(folder, "key")
    assert s3.files().info(large)["LastModified"] == before
    assert store.pull("key", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    store.remove("key")
    assert store.files_below("key") == []


def test_a_sender_killed_in_the_middle_of_a_file_leaves_nothing_that_counts(
    store: Store, s3: S3, folder: Path, tmp_path: Path
) -> None:
    """SIGKILL once the first part of the large file has arrived; parts are held up so that it cannot be over yet."""
    code = (
        "import sys, asyncio, s3fs\n"
        "from pathlib import Path\n"
        "from infra.store.bucket import Store\n"
        "call = s3fs.S3FileSystem._call_s3\n"
        "async def slow(self, method, *a, **k):\n"
        "    if method == 'upload_part' and k['PartNumber'] > 1: await asyncio.sleep(60)\n"
        "    return await call(self, method, *a, **k)\n"
        "s3fs.S3FileSystem._call_s3 = slow\n"
        f"Store({store.uri!r}, part_bytes={PART}).push(Path({str(folder)!r}), 'key')\n"
    )
    sender = subprocess.Popen([sys.executable, "-c", code])
    prefix = f"{store.uri.rpartition('/')[2]}/key"
    deadline = time.monotonic() + 60
    while not open_uploads(s3.files(), prefix) or "key/state.json" not in store.files_below(""):
        assert sender.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    assert store.sealed("key") is None
    assert store.sealed_below("") == []
    assert not store.pull("key", tmp_path / "half")
    assert open_uploads(s3.files(), prefix) == [f"{prefix}/train_state/__0_0.distcp"]

    store.push(folder, "key")
    assert open_uploads(s3.files(), prefix) == []
    assert store.pull("key", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_a_network_that_goes_in_the_middle_of_a_file_is_an_error_and_a_later_try_completes(
    store: Store, s3: S3, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug = Plug(s3)
    plug.pull_at = 2 * PART
    monkeypatch.setenv("AWS_ENDPOINT_URL", plug.address)
    # its number of tries keeps its client apart from the others'
    through = Store(store.uri, part_bytes=PART, retries=0)
    with pytest.raises(StorageError, match=r"sending s3://.*/key failed: .*Check AWS_ENDPOINT_URL and the network"):
        through.push(folder, "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.address)
    assert store.sealed("key") is None
    assert not store.pull("key", tmp_path / "half")
    plug.put_in()
    monkeypatch.setenv("AWS_ENDPOINT_URL", plug.address)
    through.push(folder, "key")
    assert through.pull("key", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    assert open_uploads(s3.files(), store.uri.rpartition("/")[2]) == []
    plug.pull_out()


def test_a_damaged_object_is_never_taken_for_the_file(store: Store, s3: S3, folder: Path, tmp_path: Path) -> None:
    store.push(folder, "key")
    s3.files().pipe_file(f"{store.uri.removeprefix('s3://')}/key/state.json", b'{"step": 5}')
    with pytest.raises(StorageError, match=r"state\.json has SHA-256 .*expected"):
        store.pull("key", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("s3", [MOTO], indirect=True)
@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", ""])
def test_a_name_in_a_bucket_cannot_lead_out_of_the_folder(store: Store, name: str, tmp_path: Path) -> None:
    seal = Seal(files={name: FileEntry(size=1, sha256="0", modified=0.0)})
    store.put(f"key/{SEAL}", seal.model_dump_json().encode())
    (tmp_path / "inner").mkdir()
    with pytest.raises(StorageError, match="leads out of"):
        store.pull("key", tmp_path / "inner" / "back")
    assert [path.name for path in tmp_path.rglob("*")] == ["inner"]


@pytest.mark.parametrize("s3", [MOTO], indirect=True)
def test_a_link_is_not_followed_into_the_bucket(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("do not send")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match="link is a link"):
        store.push(folder, "key")
    assert store.files_below("key") == []


def test_mlflow_s_own_client_reaches_the_same_bucket(store: Store, s3: S3, tmp_path: Path, empty_mlflow: Path) -> None:
    """MLflow sends artifacts with boto3, by the environment that rlflow gives to all its processes."""
    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    code = (
        "import tasks\n"  # as every flow
        "from pathlib import Path\n"
        "from infra.settings import Settings\n"
        "from infra.tracking.tracker import Tracker\n"
        "it = Settings()\n"
        "tracker = Tracker.open(uri=it.tracking_uri, artifacts_uri=it.artifacts_uri, experiment='e', run_id='r',\n"
        "    run_dir=it.runs_dir / 'r')\n"
        "tracker.log_text('said', 'folder/words.txt')\n"
        "assert tracker.artifact_names('folder') == ['folder/words.txt']\n"
    )
    env = new_shell(s3.variables, RLFLOW_STORE=store.uri, RLFLOW_DATA_DIR=str(tmp_path / "data"))
    answer = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    (name,) = store.files_below("mlflow")
    assert name.endswith("artifacts/folder/words.txt")
    assert store.get(f"mlflow/{name}") == b"said"


@pytest.mark.parametrize("s3", [SWIFT], indirect=True)
def test_a_refusal_is_reported_at_once_with_what_to_change(
    s3: Swift, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With pauses of an hour before each further try: there is none. moto refuses nothing."""
    delays = (3600.0,)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore takes a wrong certificate for an outage
    with pytest.raises(StorageRefusedError, match="does not exist. Make the bucket, or correct RLFLOW_STORE"):
        Store("s3://nobody-made-it/x", delays=delays).push(folder, "key")
    s3.make_bucket("small", quota_bytes=100)
    with pytest.raises(StorageRefusedError, match=r"exceeds quota\. Free space in the bucket or raise its quota\."):
        Store("s3://small/x", delays=delays).push(folder, "key")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test:reader")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageRefusedError, match="Denied. Give the key the rights that docs/howto/stores.md lists"):
        Store(f"s3://{BUCKET}/x", delays=delays).put("key", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageRefusedError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        Store(f"s3://{BUCKET}/x", delays=delays).put("key", b"")
    monkeypatch.setenv("AWS_CA_BUNDLE", certifi.where())
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageRefusedError, match="certificate verify failed.* Set AWS_CA_BUNDLE to a file"):
        Store(f"s3://{BUCKET}/x", delays=delays).put("key", b"")
    assert "next try" not in caplog.text


def test_an_outage_is_outlived_by_the_operation_itself(
    s3: S3, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network goes while a folder is sent, and again while it is fetched; each time it is back for the next try."""
    plug = Plug(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", plug.address)
    s3fs.S3FileSystem.clear_instance_cache()
    store = Store(f"s3://{BUCKET}/outlived", part_bytes=PART, retries=0, delays=(0.5,) * 4)
    with warnings_of_tries(plug.put_in) as told:
        plug.pull_at = 2 * PART
        store.push(folder, "key")
        assert told
        assert told[0].startswith(f"store: the next try is in 0.5 s: sending {store.uri}/key failed: ")
        said = len(told)
        plug.pull_at = plug.passed + 2000
        assert store.pull("key", tmp_path / "back")
        assert len(told) > said
    assert contents(tmp_path / "back") == contents(folder)
    plug.pull_out()
    with pytest.raises(StorageAwayError, match=r"writing s3://.*/other failed: .*It was tried 3 times in 0\.2 s\."):
        Store(store.uri, retries=0, delays=(0.1, 0.1)).put("other", b"")


def test_of_two_writers_who_have_read_the_same_one_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.replace("holder", b"first", None)
    assert not store.replace("holder", b"second", None)
    assert store.get("holder") == b"first"
    assert store.replace("holder", b"second", b"first")
    assert not store.replace("holder", b"third", b"first")
    assert store.get("holder") == b"second"


@pytest.mark.parametrize("s3", [MOTO], indirect=True)
def test_a_writer_that_comes_between_look_and_write_is_not_overwritten(
    store: Store, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swift has no conditional writes."""
    look = Store.get

    def then_another_writes(self: Store, key: str) -> bytes | None:
        found = look(self, key)
        store.put(key, b"another's")
        return found

    for before in (None, b"another's"):
        key = f"holder-{before is None}"
        if before is not None:
            store.put(key, b"another's before")
            before = b"another's before"
        monkeypatch.setattr(Store, "get", then_another_writes)
        assert not store.replace(key, b"ours", before)
        monkeypatch.undo()
        assert store.get(key) == b"another's"
