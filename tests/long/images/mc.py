"""Stands for MinIO's client mc: the commands that bucket.sh and the health check of compose.yaml use, no other."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

_REGION = "us-east-1"


class Server:
    """The one that MC_HOST_objects names, with its keys."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = f"http://{parts.hostname}:{parts.port}"
        self._key, self._secret = str(parts.username), str(parts.password)

    def make_bucket(self, name: str) -> None:
        import boto3  # takes seconds, which the health check does not have

        client = boto3.client(
            "s3",
            endpoint_url=self._address,
            aws_access_key_id=self._key,
            aws_secret_access_key=self._secret,
            region_name=_REGION,
        )
        client.create_bucket(Bucket=name)  # moto's answer in this region is the same for a bucket that is there

    def ask(self, method: str, path: str, body: bytes = b"") -> str:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        request = AWSRequest(method, f"{self._address}/minio/admin/{path}", data=body)
        request.headers["Host"] = urlsplit(self._address).netloc
        S3SigV4Auth(Credentials(self._key, self._secret), "s3", _REGION).add_auth(request)
        asked = urllib.request.Request(request.url, data=body, method=method, headers=dict(request.headers))
        with urllib.request.urlopen(asked, timeout=10) as reply:
            return str(reply.read().decode())


def main() -> int:
    words = sys.argv[1:]
    if words == ["ready", "local"]:
        urllib.request.urlopen("http://127.0.0.1:9000/minio/health/ready", timeout=3).close()
        return 0
    server = Server(os.environ["MC_HOST_objects"])  # noqa: SIM112 - the alias
    try:
        match words:
            case ["mb", "--ignore-existing", bucket] if bucket.startswith("objects/"):
                server.make_bucket(bucket.removeprefix("objects/"))
            case ["admin", "policy", "create", "objects", name, file]:
                server.ask("PUT", f"policies/{name}", Path(file).read_bytes())
            case ["admin", "user", "add", "objects"]:
                user, secret = sys.stdin.read().split()
                server.ask("PUT", f"users/{user}", secret.encode())
            case ["admin", "policy", "attach", "objects", name, "--user", user]:
                server.ask("PUT", f"attached/{user}", name.encode())
            case ["admin", "user", "info", "objects", user]:
                sys.stdout.write(
                    f"AccessKey: {user}\nStatus: enabled\nPolicyName: {server.ask('GET', f'attached/{user}')}\n"
                )
            case _:
                sys.stderr.write(f"mc {' '.join(words)} is not known here\n")
                return 2
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"mc: {error}\n")
        return 1 if error.code == HTTPStatus.CONFLICT else 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
