"""Prefect's server, for ``uvicorn --factory infra.stack.prefect_app:create``: its own application behind a check of the
Host header, which Prefect itself does not make."""

from __future__ import annotations

from prefect.server.api.server import create_app
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from infra.settings import Settings


def create() -> ASGIApp:
    """Refuses, with 400, every name that is not one of ``Settings.names``; pages and websockets alike.

    The check is around the application and not in it: the server's own automations call the inner one, by a name that
    nobody may use from outside.
    """
    return TrustedHostMiddleware(create_app(final=True), allowed_hosts=Settings().names, www_redirect=False)
