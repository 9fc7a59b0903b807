"""Errors of files, object stores and servers. Every message says what was found, what is allowed and what to change.

``rlcore`` has its own error classes because the two packages never import each other. ``tasks`` treats both alike.
"""

from __future__ import annotations

from typing import ClassVar


class InfraError(Exception):
    """Base of all errors that ``infra`` raises on purpose."""


class StorageError(InfraError, OSError):
    """A file problem: missing, no space, no permission, or an incomplete download."""

    permanent: ClassVar[bool] = False
    """Whether a retry is useless until somebody changes what the message names."""


class StorageRefusedError(StorageError):
    """The object store refused the request: keys, rights, quota, no such bucket, a certificate."""

    permanent = True


class StorageDamagedError(StorageError):
    """An object is unusable: it does not match the list of files, or its name leads outside its folder."""

    permanent = True


class StorageUnusableError(StorageError):
    """A file, folder or disk is missing, too small or not writable. A retry changes nothing."""

    permanent = True


class StorageAwayError(StorageError):
    """The object store did not answer any of an operation's tries. The run can be continued once the store answers."""


class ServerError(InfraError, ConnectionError):
    """MLflow, Prefect or Ray cannot be reached."""


class ServerRefusedError(ServerError):
    """A server refuses (login, rights, a wrong request), or a tracker is not installed. A retry changes nothing."""


class RegistryError(InfraError, ValueError):
    """MLflow cannot store or find a model or run until somebody changes what the message names."""


class DeploymentError(InfraError, ValueError):
    """A deployment file for a cluster cannot be written with these values."""
