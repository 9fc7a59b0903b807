"""Stands for the image minio/minio: moto's S3 with keys, signatures and policies that are checked, on the disk.

``python objects.py server FOLDER --console-address ADDRESS``. Requests that change something are kept in the folder and
taken again at the next start. What ``mc admin`` asks for is at /minio/admin, with bodies of our own.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import Client

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>[^,]+), ?SignedHeaders=(?P<headers>[^,]+), ?"
    r"Signature=(?P<signature>[0-9a-f]+)"
)


class ObjectStore:
    def __init__(self, folder: Path, root: tuple[str, str]) -> None:
        self._users, self._log = folder / "users.json", folder / "requests.jsonl"
        self._root = root
        known = json.loads(self._users.read_text()) if self._users.exists() else {}
        self._secrets: dict[str, str] = known.get("secrets", {})
        self._policies: dict[str, Any] = known.get("policies", {})
        self._attached: dict[str, str] = known.get("attached", {})
        self._s3: App = DomainDispatcherApplication(create_backend_app)
        self._take_again()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        url = urlsplit(environ["RAW_URI"])
        if url.path == "/minio/health/ready":
            return answer(start, "200 OK")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        user = self._who(environ, url.path, url.query)
        if user is None:
            return answer(start, "403 Forbidden", "<Error><Code>SignatureDoesNotMatch</Code></Error>")
        if url.path.startswith("/minio/admin/"):
            return self._administer(start, user, url.path.split("/")[3:], body)
        if not self._may(user, *action_of(environ["REQUEST_METHOD"], unquote(url.path), url.query)):
            return answer(start, "403 Forbidden", "<Error><Code>AccessDenied</Code></Error>")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self._keep(environ, body)
        return self._s3(environ, start)

    def _who(self, environ: dict[str, Any], path: str, query: str) -> str | None:
        """The user who has signed the request (Signature Version 4). None: nobody that is known."""
        found = _AUTHORIZATION.match(environ.get("HTTP_AUTHORIZATION", ""))
        secret = None if found is None else dict([*self._secrets.items(), self._root]).get(found["key"])
        if found is None or secret is None:
            return None
        names = found["headers"].split(";")
        parameters = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, True))
        lines = [
            environ["REQUEST_METHOD"],
            path,
            "&".join(f"{name}={value}" for name, value in parameters),
            *(f"{name}:{' '.join(header(environ, name).split())}" for name in names),
            "",
            found["headers"],
            header(environ, "x-amz-content-sha256"),
        ]
        hashed = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", header(environ, "x-amz-date"), found["scope"], hashed])
        key = f"AWS4{secret}".encode()
        for part in (*found["scope"].split("/"), text):
            key = hmac.digest(key, part.encode(), "sha256")
        return found["key"] if hmac.compare_digest(key.hex(), found["signature"]) else None

    def _may(self, user: str, action: str, resource: str) -> bool:
        if user == self._root[0]:
            return True
        statements = self._policies.get(self._attached.get(user, ""), {"Statement": []})["Statement"]
        return any(
            action in item["Action"] and any(fnmatch.fnmatchcase(resource, pattern) for pattern in item["Resource"])
            for item in statements
        )

    def _administer(self, start: Callable[..., Any], user: str, words: list[str], body: bytes) -> Iterable[bytes]:
        if user != self._root[0]:
            return answer(start, "403 Forbidden")
        match words:
            case ["policies", name]:
                self._policies[name] = json.loads(body)
            case ["users", name]:
                self._secrets[name] = body.decode()
            case ["attached", name] if body:
                if self._attached.get(name) == body.decode():
                    return answer(start, "409 Conflict")
                self._attached[name] = body.decode()
            case ["attached", name]:
                return answer(start, "200 OK", self._attached.get(name, ""))
        known = {"secrets": self._secrets, "policies": self._policies, "attached": self._attached}
        written = self._users.with_suffix(".new")
        written.write_text(json.dumps(known))
        written.rename(self._users)
        return answer(start, "200 OK")

    def _keep(self, environ: dict[str, Any], body: bytes) -> None:
        headers = {name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")}
        headers |= {name: environ[name] for name in ("CONTENT_TYPE",) if environ.get(name)}
        kept = [environ["REQUEST_METHOD"], environ["RAW_URI"], headers, base64.b64encode(body).decode()]
        with self._log.open("a") as log:
            log.write(json.dumps(kept) + "\n")
            log.flush()
            os.fsync(log.fileno())

    def _take_again(self) -> None:
        client = Client(self._s3)
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            method, url, headers, body = json.loads(line)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            client.open(url, method=method, headers=named, data=base64.b64decode(body))


def header(environ: dict[str, Any], name: str) -> str:
    plain = name.upper().replace("-", "_")
    return str(environ.get(f"HTTP_{plain}", environ.get(plain, "")))


def action_of(method: str, path: str, query: str) -> tuple[str, str]:
    """The action of a request and what it acts on, as a policy names them."""
    bucket, _, key = path.lstrip("/").partition("/")
    asked = {name for name, _ in parse_qsl(query, True)}
    if key:
        names = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "POST": "PutObject"}
        names["DELETE"] = "AbortMultipartUpload" if "uploadId" in asked else "DeleteObject"
        return f"s3:{names[method]}", f"arn:aws:s3:::{bucket}/{key}"
    if method == "POST" and "delete" in asked:
        return "s3:DeleteObject", f"arn:aws:s3:::{bucket}/*"
    if method in ("GET", "HEAD"):
        special = {"location": "GetBucketLocation", "uploads": "ListBucketMultipartUploads"}
        return next(
            (f"s3:{special[name]}" for name in asked & special.keys()), "s3:ListBucket"
        ), f"arn:aws:s3:::{bucket}"
    return "s3:CreateBucket", f"arn:aws:s3:::{bucket}"


def answer(start: Callable[..., Any], status: str, text: str = "") -> Iterable[bytes]:
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text.encode())))])
    return [text.encode()]


def main() -> None:
    command, folder, *_ = sys.argv[1:]
    if command != "server":
        sys.exit(f"{command!r} is not a command of this image. Allowed: server.")
    store = ObjectStore(Path(folder), (os.environ["MINIO_ROOT_USER"], os.environ["MINIO_ROOT_PASSWORD"]))
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    run_simple("0.0.0.0", 9000, store, threaded=True)


if __name__ == "__main__":
    main()
