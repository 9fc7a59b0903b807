"""OpenStack Swift's S3 front over TLS, from Debian's packages: a server that is nobody's test double."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path

import s3fs

from tests.ports import reserved_port
from tests.stores import BUCKET, S3, end_with_parent, wait_for_answer

_PYTHON = Path("/usr/bin/python3")  # the one that Debian's swift is installed for
_LAYERS = ("account", "container", "object")
_RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(sys.argv[1::2], sys.argv[2::2]):
    ring = RingBuilder(1, 1, 1)  # two partitions, one replica
    ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "d1", "weight": 1.0})
    ring.rebalance()
    ring.get_ring().save(f"{name}.ring.gz")
"""
_LAYER = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
_PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
cert_file = {folder}/server.pem
key_file = {folder}/server.key
[pipeline:main]
pipeline = catch_errors proxy-logging cache s3api tempauth copy container-quotas slo dlo versioned_writes proxy-logging
    proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
user_test_reader = {secret}
[filter:copy]
use = egg:swift#copy
[filter:container-quotas]
use = egg:swift#container_quotas
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
"""


@dataclass(slots=True)
class Swift(S3):
    """Its proxy can be stopped and started again; what it holds stays."""

    folder: Path = Path()
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def variables(self) -> Mapping[str, str]:
        return {**S3.variables.__get__(self), "AWS_CA_BUNDLE": str(self.ca)}

    def files(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            endpoint_url=self.address,
            key=self.access_key,
            secret=self.secret_key,
            client_kwargs={"verify": str(self.ca)},
            config_kwargs={"request_checksum_calculation": "when_required"},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def start(self, log: Path) -> None:
        """All of it, with an empty bucket."""
        (self.folder / "devices" / "d1").mkdir(parents=True)
        ports = {name: reserved_port() for name in _LAYERS}
        memcached = reserved_port()
        self._make_certificates()
        (self.folder / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_suffix = rlflow\n[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        values = {"user": pwd.getpwuid(os.geteuid()).pw_name, "folder": self.folder}
        for name, port in ports.items():
            (self.folder / f"{name}.conf").write_text(_LAYER.format(name=name, port=port, **values))
        (self.folder / "proxy.conf").write_text(
            _PROXY.format(port=self.port, memcached=memcached, secret=self.secret_key, **values)
        )
        rings = [part for name, port in ports.items() for part in (name, str(port))]
        subprocess.run([_PYTHON, "-c", _RINGS, *rings], check=True, cwd=self.folder, capture_output=True)
        self.others.append(self._run(["memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", str(memcached)], log))
        for name in _LAYERS:
            self.others.append(self._run([f"swift-{name}-server", str(self.folder / f"{name}.conf"), "-v"], log))
        self.start_proxy(log)
        self.files().mkdir(BUCKET)

    def start_proxy(self, log: Path) -> None:
        self.process = self._run(["swift-proxy-server", str(self.folder / "proxy.conf"), "-v"], log)
        wait_for_answer(f"{self.address}/healthcheck", self.process, log, ca=self.ca)

    def make_bucket(self, name: str, *, quota_bytes: int) -> None:
        """By Swift's own protocol: S3's has no quotas."""
        self.files().mkdir(name)
        login = {"X-Auth-User": self.access_key, "X-Auth-Key": self.secret_key}
        with self._ask("auth/v1.0", login, "GET") as answer:
            token = {"X-Auth-Token": answer.headers["X-Auth-Token"]}
        self._ask(f"v1/AUTH_test/{name}", {**token, "X-Container-Meta-Quota-Bytes": str(quota_bytes)}, "POST").close()

    def _ask(self, path: str, headers: Mapping[str, str], method: str) -> HTTPResponse:
        request = urllib.request.Request(f"{self.address}/{path}", headers=dict(headers), method=method)
        trusted = ssl.create_default_context(cafile=str(self.ca))
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=20, context=trusted)
        return answer

    def stop(self) -> None:
        S3.stop(self)
        for process in self.others:
            process.kill()
            process.wait()

    def _run(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=end_with_parent)

    def _make_certificates(self) -> None:
        new = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        ]
        authority = ["-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=rlflow tests"]
        server = ["-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "server.key", "-out", "server.pem"]
        named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        for command in ([*new, *authority], [*new, *server, *named, "-addext", "basicConstraints=critical,CA:FALSE"]):
            subprocess.run(command, check=True, cwd=self.folder, capture_output=True)


def check_programs() -> None:
    """
    Raises:
        FileNotFoundError: a program is missing.
    """
    missing = [name for name in ("swift-proxy-server", "memcached", "openssl") if shutil.which(name) is None]
    if missing:
        raise FileNotFoundError(f"no {', '.join(missing)} on the PATH")


@contextmanager
def swift_server(folder: Path) -> Iterator[Swift]:
    """A Swift with its files below ``folder``."""
    check_programs()
    s3fs.S3FileSystem.clear_instance_cache()
    server = Swift(reserved_port(), "test:tester", secrets.token_hex(20), folder=folder)
    try:
        server.start(folder / "log")
        yield server
    finally:
        server.stop()
