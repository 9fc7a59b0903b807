"""A real PostgreSQL and an S3 server for tests, each in a temporary folder and on a free port of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import psycopg
import s3fs

from infra.logs import get_logger
from tests.ports import reserved_port
from tests.shell import new_shell

BUCKET = "rlflow-tests"
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Postgres:
    port: int
    password: str

    def url(self, database: str) -> str:
        return f"postgresql://tester:{self.password}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str, *, like: str = "template1") -> str:
        """A new database with the tables of ``like``; its address."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}" TEMPLATE "{like}"')  # type: ignore[call-overload]
        return self.url(database)


def postgres_programs() -> Path:
    """The folder of Debian's newest PostgreSQL, or of the one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    usable = [folder for folder in folders if (folder / "initdb").exists()]
    on_path = shutil.which("initdb")
    if not usable and on_path is None:
        raise FileNotFoundError("no initdb in /usr/lib/postgresql/*/bin or on the PATH")
    return usable[-1] if usable else Path(str(on_path)).resolve().parent


def end_with_parent() -> None:
    """In a child before it begins: Linux sends it SIGINT when the tests die, however they do."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """As its own user where we are root: it refuses to be one."""
    programs = postgres_programs()
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="rlflow-postgres-"))
    password, port = secrets.token_hex(8), reserved_port()
    (folder / "password").write_text(password)
    if user:
        for path in (folder, folder / "password"):
            shutil.chown(path, "postgres", "postgres")
    data = folder / "data"
    make = [programs / "initdb", "-D", data, "-U", "tester", "-A", "scram-sha-256", "--no-sync"]
    try:
        with (folder / "log").open("wb") as log:
            subprocess.run(
                [*make, f"--pwfile={folder / 'password'}"], check=True, stdout=log, stderr=log, cwd="/", **user
            )
            options = ["-F", "-p", str(port), "-h", "127.0.0.1", "-k", folder]
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, *options],
                stdout=log,
                stderr=log,
                cwd="/",
                preexec_fn=end_with_parent,
                **user,
            )
        try:
            found = Postgres(port, password)
            _wait_for(found, server, folder / "log")
            yield found
        finally:
            server.send_signal(signal.SIGINT)  # at once, clients disconnected
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _wait_for(found: Postgres, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            psycopg.connect(found.url("postgres"), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def wait_for_answer(address: str, process: subprocess.Popen[bytes], log: Path, *, ca: Path | None = None) -> None:
    """Until the server at ``address`` answers anything but an error of its own."""
    deadline = time.monotonic() + _START_SECONDS
    trusted = None if ca is None else ssl.create_default_context(cafile=str(ca))
    while True:
        try:
            with urllib.request.urlopen(address, timeout=2, context=trusted):
                return
        except urllib.error.HTTPError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                return
        except OSError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@dataclass(slots=True)
class S3:
    """An S3 server that can be killed; what it held is gone then."""

    port: int
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def files(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            endpoint_url=self.address,
            key=self.access_key,
            secret=self.secret_key,
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def start(self, log: Path) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", self.host, "-p", str(self.port)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=end_with_parent)
        wait_for_answer(f"{self.address}/moto-api/data.json", self.process, log)
        self.files().mkdir(BUCKET)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def s3_server(log: Path, host: str = "127.0.0.1") -> Iterator[S3]:
    s3fs.S3FileSystem.clear_instance_cache()  # of another server: it keeps those that the environment told before
    server = S3(reserved_port(), secrets.token_hex(10), secrets.token_hex(20), host=host)
    try:
        server.start(log)
        yield server
    finally:
        server.stop()


class Plug:
    """A way to the S3 server that can be pulled out while bytes flow, and put in again."""

    def __init__(self, server: S3) -> None:
        self.port, self._target = reserved_port(), server.port
        self.address = server.address.replace(str(server.port), str(self.port))
        self._connections: list[socket.socket] = []
        self.passed = 0  # bytes towards the server
        self.pull_at: int | None = None
        self.is_out = False
        self._plug_in()

    def _plug_in(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._connections += [client, server]
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(65536):
                self.passed += len(data) if counts else 0
                if self.pull_at is not None and self.passed > self.pull_at:
                    self.pull_out()
                sink.sendall(data)
        except OSError:
            pass  # pulled out
        finally:
            source.close()
            sink.close()

    def pull_out(self) -> None:
        self.is_out = True
        for end in (self._listener, *self._connections):
            with suppress(OSError):  # closed already
                end.shutdown(socket.SHUT_RDWR)  # close() alone leaves a thread that waits for it waiting
            end.close()
        self._connections.clear()

    def put_in(self) -> None:
        """Nothing where it is in already."""
        if not self.is_out:
            return
        self.pull_at, self.is_out = None, False
        self._plug_in()


@contextmanager
def warnings_of_tries(react: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """What the log says of further tries meanwhile; ``react`` is called after each line."""
    told: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        if "the next try is in" in record.getMessage():
            told.append(record.getMessage())
            react()
        return True

    get_logger().addFilter(hear)
    try:
        yield told
    finally:
        get_logger().removeFilter(hear)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a stack's data lies in, as the variables that say so; empty for the embedded one."""

    name: str
    make: Callable[[str], Mapping[str, str]]
    postgres: Postgres | None = None
    s3: S3 | None = None

    def variables(self, test: str) -> Mapping[str, str]:
        """Databases and a prefix that nobody else uses."""
        return self.make(f"{test}_{secrets.token_hex(3)}")


def embedded_parts() -> Parts:
    return Parts("sqlite-local", lambda _: {})


@contextmanager
def postgres_and_s3(folder: Path) -> Iterator[Parts]:
    """Tables are made once and copied: for Prefect alone that takes the best part of a minute."""
    with postgres_server() as postgres, s3_server(folder / "s3.log") as s3:
        _make_tables(postgres, folder)

        def variables(name: str) -> Mapping[str, str]:
            return {
                "RLFLOW_PREFECT_DATABASE": postgres.create(f"prefect_{name}", like="prefect_tables"),
                "RLFLOW_MLFLOW_DATABASE": postgres.create(f"mlflow_{name}", like="mlflow_tables"),
                "RLFLOW_STORE": f"s3://{BUCKET}/{name}",
                **s3.variables,
            }

        yield Parts("postgres-s3", variables, postgres, s3)


def _make_tables(postgres: Postgres, folder: Path) -> None:
    prefect = postgres.create("prefect_tables").replace("postgresql://", "postgresql+asyncpg://")
    mlflow = postgres.create("mlflow_tables").replace("postgresql://", "postgresql+psycopg://")
    env = new_shell(PREFECT_HOME=str(folder / "prefect"), PREFECT_SERVER_DATABASE_CONNECTION_URL=prefect)
    commands = (
        [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"],
        # MLflow's own upgrade command takes a database that has tables; its store makes them.
        [sys.executable, "-c", f"import mlflow; mlflow.MlflowClient({mlflow!r}).search_experiments()"],
    )
    for command in commands:
        answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr


def open_uploads(files: s3fs.S3FileSystem, prefix: str = "") -> list[str]:
    """Keys of multipart uploads that were begun and neither completed nor aborted."""
    answer = files.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix)
    return [upload["Key"] for upload in answer.get("Uploads", [])]
