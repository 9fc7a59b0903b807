"""What an object store's errors mean: which of them pass by themselves, and what to do about the others."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from http import HTTPStatus

from aiohttp import ClientError as HttpClientError
from boto3.exceptions import Boto3Error
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from infra.errors import StorageError, StorageRefusedError
from infra.logs import redact

OBJECT_STORE_ERRORS = (BotoCoreError, ClientError, Boto3Error, ResponseParserError, HttpClientError)
"""What boto3 and the libraries below it raise."""
STORE_ERRORS = (OSError, *OBJECT_STORE_ERRORS)
"""What s3fs, boto3 and the libraries below them raise."""

_PASSING_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "OperationAborted", "NoSuchUpload", "IncompleteBody", "BadDigest"}
    | {"XAmzContentSHA256Mismatch", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
)
_PASSING_STATUS = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})
_LASTING_STATUS = frozenset({HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.INSUFFICIENT_STORAGE})

_CERTIFICATE = "Set AWS_CA_BUNDLE to a file with the certificate of the server's authority"
_ADDRESS = "Check RLFLOW_STORE, AWS_ENDPOINT_URL and the keys"
_NETWORK = "Check AWS_ENDPOINT_URL and the network"
_DISK = "Free space on this machine's disk, or make the folder writable"
# Advice -> codes and HTTP statuses.
_ANSWERS = {
    "Make the bucket, or correct RLFLOW_STORE": ("NoSuchBucket",),
    "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY": ("InvalidAccessKeyId", "SignatureDoesNotMatch"),
    "Renew the credentials": ("ExpiredToken",),
    "Set this machine's clock": ("RequestTimeTooSkewed",),
    "Give the key the rights that docs/howto/stores.md lists": ("AccessDenied", "Forbidden", "403"),
    "Free space in the bucket or raise its quota": (
        *("EntityTooLarge", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"),
        *("XMinioAdminBucketQuotaExceeded", "413", "507"),
    ),
    "Set AWS_DEFAULT_REGION to the bucket's region": (
        *("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"),
    ),
}
_ADVICE = {answer: advice for advice, answers in _ANSWERS.items() for answer in answers}
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


def storage_error(what: str, error: Exception) -> StorageError:
    """The error of an operation on the object store, in words: refused for good, or away for now.

    Args:
        what: the operation, as "sending ... to ...".
        error: one of ``STORE_ERRORS``.
    """
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    said = redact(str(words)).rstrip(". ")
    answer = answer_of(error)
    if answer is not None:
        code, status = answer
        passing = (
            code in _PASSING_CODES or status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_STATUS)
        )
        if passing:
            return StorageError(f"{what} failed: {said}. {_NETWORK}.")
        return StorageRefusedError(f"{what} failed: {said}. {_ADVICE.get(code) or _ADVICE.get(str(status), _ADDRESS)}.")
    causes = list(_causes(error))
    if any("CERTIFICATE_VERIFY_FAILED" in str(cause) for cause in causes if isinstance(cause, SSLError)):
        return StorageRefusedError(f"{what} failed: {said}. {_CERTIFICATE}.")
    if any(isinstance(cause, ConnectionError | HTTPClientError) for cause in causes):
        return StorageError(f"{what} failed: {said}. {_NETWORK}.")
    if any(isinstance(cause, BotoCoreError) for cause in causes):  # no keys, a bad region: found before any request
        return StorageRefusedError(f"{what} failed: {said}. {_ADDRESS}.")
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return StorageError(f"{what} failed: {said}. {_DISK}.")
    return StorageError(f"{what} failed: {said}. {_NETWORK}.")


def answer_of(error: BaseException) -> tuple[str, int] | None:
    """Code and HTTP status of the store's answer; None: there was no answer."""
    for cause in _causes(error):
        if isinstance(cause, ClientError):
            code = str(cause.response.get("Error", {}).get("Code", ""))
            status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return code, int(status)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    item: BaseException | None = error
    while item is not None:
        yield item
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)
