"""Errors of the outside world. Every message says what was found, what is allowed and what to change.

``rlcore`` has names of its own for the same boundaries; the two packages never import each other, and
``tasks`` treats both alike.
"""

from __future__ import annotations

from typing import ClassVar


class InfraError(Exception):
    """Base of all errors that ``infra`` raises on purpose."""


class StorageError(InfraError, OSError):
    """Files: missing, no space, no permission, or a download that did not arrive whole."""

    permanent: ClassVar[bool] = False
    """True: another try gives the same answer until somebody changes what the message names."""


class StorageRefusedError(StorageError):
    """The object store answered and refused: keys, rights, quota, no such bucket, a certificate."""

    permanent = True


class StorageDamagedError(StorageError):
    """What the object store holds cannot be used: it does not match its list of files, or a name leads elsewhere."""

    permanent = True


class StorageUnusableError(StorageError):
    """A file, folder or disk that was named is not there, too small or not writable. Asking again changes nothing."""

    permanent = True


class StorageAwayError(StorageError):
    """The object store was away for all the tries that one operation has. Trying again at once would only wait again;
    the run can be continued once the store answers."""


class ServerError(InfraError, ConnectionError):
    """MLflow, Prefect or Ray cannot be reached."""


class ServerRefusedError(ServerError):
    """A server answers and says no (a login, rights, a wrong request), or a tracker is not installed. Asking again
    changes nothing."""


class RegistryError(InfraError, ValueError):
    """MLflow cannot take a model or a run as asked, until somebody changes what the message names."""


class DeploymentError(InfraError, ValueError):
    """A file for a cluster cannot be written as asked."""
