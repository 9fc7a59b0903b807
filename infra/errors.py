"""Errors of the outside world. Every message says what was found, what is allowed and what to change.

``rlcore`` has names of its own for the same boundaries; the two packages never import each other, and
``tasks`` treats both alike.
"""

from __future__ import annotations


class InfraError(Exception):
    """Base of all errors that ``infra`` raises on purpose."""


class StorageError(InfraError, OSError):
    """Files: missing, no space, no permission, or a download that did not arrive whole."""


class ServerError(InfraError, ConnectionError):
    """MLflow, Prefect or Ray cannot be reached."""


class RegistryError(InfraError, ValueError):
    """A model cannot be registered as asked."""


class DeploymentError(InfraError, ValueError):
    """A file for a cluster cannot be written as asked."""
