"""What an object store's answers mean: refused for good, or away for now."""

from __future__ import annotations

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, SSLError
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from infra.errors import StorageDamagedError, StorageError, StorageRefusedError
from infra.store.bucket import Store
from infra.store.s3_errors import storage_error
from tasks.driver.failures import Failure, failure_of


def answer(code: str, status: int, message: str = "Said by the server.") -> ClientError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "status", "step"),
    [
        ("AccessDenied", 403, "Give the key the rights that docs/howto/stores.md lists."),
        ("403", 403, "Give the key the rights"),
        ("InvalidAccessKeyId", 403, "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."),
        ("SignatureDoesNotMatch", 403, "Check AWS_ACCESS_KEY_ID"),
        ("RequestTimeTooSkewed", 403, "Set this machine's clock."),
        ("QuotaExceeded", 403, "Free space in the bucket or raise its quota."),
        ("EntityTooLarge", 400, "Free space in the bucket or raise its quota."),  # Swift
        ("XMinioAdminBucketQuotaExceeded", 400, "Free space in the bucket"),
        ("413", 413, "Free space in the bucket"),
        ("XMinioStorageFull", 507, "Free space in the bucket"),
        ("NoSuchBucket", 404, "Make the bucket, or correct RLFLOW_STORE."),
        ("PermanentRedirect", 301, "Set AWS_DEFAULT_REGION"),
        ("InvalidRequest", 400, "Check RLFLOW_STORE, AWS_ENDPOINT_URL and the keys."),
        ("NotImplemented", 501, "Check RLFLOW_STORE"),
    ],
)
@pytest.mark.parametrize("by", ["boto3", "s3fs"])
def test_a_refusal_is_permanent_and_says_the_next_step(code: str, status: int, step: str, by: str) -> None:
    raised = answer(code, status)
    error = storage_error("sending step-000004", translate_boto_error(raised) if by == "s3fs" else raised)
    assert isinstance(error, StorageRefusedError)
    assert error.permanent
    assert "Said by the server. " in str(error), "one full stop"
    assert step in str(error)
    assert failure_of(error) == Failure.BAD_INPUT, "never retried"


@pytest.mark.parametrize(
    "raised",
    [
        answer("SlowDown", 503),
        answer("InternalError", 500),
        answer("502", 502),
        answer("RequestTimeout", 400),
        answer("OperationAborted", 409),
        answer("429", 429),
        EndpointConnectionError(endpoint_url="https://store.test"),
        SSLError(endpoint_url="https://store.test", error="EOF occurred in violation of protocol"),
        ClientPayloadError("Response payload is not completed"),
        TimeoutError(),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_an_outage_passes(raised: Exception) -> None:
    error = storage_error("reading s3://lab/x", raised)
    assert type(error) is StorageError
    assert not error.permanent
    assert str(error).startswith("reading s3://lab/x failed: ")
    assert "Check AWS_ENDPOINT_URL and the network." in str(error)
    assert failure_of(error) == Failure.STORAGE


def test_what_no_request_can_mend_is_permanent() -> None:
    untrusted = SSLError(endpoint_url="https://store.test", error="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed")
    assert "Set AWS_CA_BUNDLE" in str(storage_error("reading x", untrusted))
    assert storage_error("reading x", untrusted).permanent
    assert storage_error("reading x", NoCredentialsError()).permanent
    assert failure_of(StorageDamagedError("x")) == Failure.BAD_INPUT


def test_a_full_disk_here_is_no_matter_of_the_store() -> None:
    error = storage_error("fetching x", OSError(errno.ENOSPC, "No space left on device"))
    assert not error.permanent
    assert "Free space on this machine's disk" in str(error)


class _Busy(BaseHTTPRequestHandler):
    """An endpoint that answers every request with 503."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("variable", "tries"), [(None, 2), ("1", 1), ("3", 3)])
def test_botocore_s_own_variable_says_how_often_a_request_is_tried(
    variable: str | None, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    if variable is not None:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", variable)
    monkeypatch.setattr(_Busy, "asked", [])
    S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StorageError):
            Store("s3://bucket/prefix", retries=1).get("key")
    finally:
        S3FileSystem.clear_instance_cache()
        server.shutdown()
        server.server_close()
    assert _Busy.asked == ["/bucket/prefix/key"] * tries
