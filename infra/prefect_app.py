"""Prefect's server as ``uvicorn --factory infra.prefect_app:create`` runs it: its own application behind a look at the
Host header, which Prefect itself takes as it comes."""

from __future__ import annotations

from fastapi import FastAPI
from prefect.server.api.server import create_app
from starlette.middleware.trustedhost import TrustedHostMiddleware

from infra.settings import Settings

_ITSELF = "prefect-in-memory"  # what the server's own automations call it by, without a network between


def create() -> FastAPI:
    """Refuses, with 400, every name that is not one of ``Settings.names``; pages and websockets alike."""
    app = create_app(final=True)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*Settings().names, _ITSELF], www_redirect=False)
    return app
