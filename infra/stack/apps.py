"""The server applications, for ``uvicorn --factory infra.stack.apps:prefect`` and ``infra.stack.apps:mlflow``."""

from __future__ import annotations

import asyncio
import hmac
import os
import uuid
from collections.abc import Coroutine
from typing import Any

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.settings import Settings
from infra.stack.login import Login


class PasswordRequired:
    """Answers 401 to every request without the login. Health checks need none.

    ``name`` of the server, and where its clients put the login, are for people.
    """

    def __init__(self, app: ASGIApp, login: Login, *, name: str, where: str) -> None:
        self._app = app
        self._name, self._where = name, where
        self._expected = login.header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = PlainTextResponse(
                f"{self._name} of rlflow wants a login: {self._where}.\n",
                status_code=401,
                headers={"WWW-Authenticate": f'Basic realm="{self._name} of rlflow", charset="UTF-8"'},
            )
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def do_not_wait_for_automations() -> None:
    """Keep Prefect's server from stopping for good when an automation is written (Prefect's issue 23055, in 3.7.7).

    After each write to SQLite, the server's event loop waits until a second loop has updated the automations in memory.
    That update needs a lock. If a task of the waiting loop holds the lock, neither goes on. Here the update is a task
    of the server's own loop, and nothing waits for it.
    """
    from prefect.server.events.models import automations

    updates: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task

    def update(change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        updates.add(task)
        task.add_done_callback(updates.discard)

    automations.run_coro_as_sync = update  # type: ignore[attr-defined, assignment]


def prefect() -> ASGIApp:
    """Prefect's server. It answers 400 to every host name that is not in ``Settings.names``, for pages and websockets.
    Prefect itself does not check host names.

    The check is outside Prefect's application, because Prefect's own automations call that one in memory under a name
    that must not be allowed from outside.
    """
    from prefect.server.api.server import create_app

    do_not_wait_for_automations()
    return TrustedHostMiddleware(create_app(final=True), allowed_hosts=Settings().names, www_redirect=False)


def mlflow() -> ASGIApp:
    """MLflow's server behind a password, with the variables that ``mlflow server`` sets for it.

    MLflow's basic-auth application needs more packages, a database of users and a slow hash per request. One user needs
    none of that."""
    from mlflow.server import constants

    database = os.environ["MLFLOW_BACKEND_STORE_URI"]
    os.environ.update(
        {
            constants.BACKEND_STORE_URI_ENV_VAR: database,
            constants.REGISTRY_STORE_URI_ENV_VAR: database,
            constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
            constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ["MLFLOW_ARTIFACTS_DESTINATION"],
            constants.SERVE_ARTIFACTS_ENV_VAR: "true",
            # These two keep the server from running code that a client has stored.
            "_MLFLOW_SERVER_BOOT_ID": uuid.uuid4().hex,
            "_MLFLOW_IN_JOB_EXECUTOR": "false",
        }
    )
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(database, database, "mlflow-artifacts:/")
    login = Login(os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"])
    return PasswordRequired(app, login, name="MLflow", where="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
