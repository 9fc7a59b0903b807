"""A startup plugin of Prefect: ``prefect deployment run NAME`` runs the one deployment that is called so, and Prefect's
commands find the local stack of the data folder where no other server is set.

Stock Prefect asks for FLOW/NAME. Its lookup is private, so it is wrapped where it is known to be as expected, and left
as it is everywhere else. On by ``[tool.prefect.plugins]`` in pyproject.toml for whoever is in the repository's root, by
``prefect config set PREFECT_PLUGINS_ENABLED=true`` anywhere; workers run without it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from prefect.plugins import HookContext, SetupResult, register_hook

from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.services import read_state

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

    Lookup = Callable[[PrefectClient, str | None, str | None], Awaitable[DeploymentResponse]]

_KNOWN_VERSIONS = ("3.7.",)
_KNOWN_ARGUMENTS = ["client", "name", "deployment_id"]


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Called by Prefect at its import."""
    if runs_a_deployment(sys.orig_argv) and ctx.prefect_version.startswith(_KNOWN_VERSIONS):
        from prefect.cli import deployment

        accept_bare_names(deployment)
    settings = Settings()
    state = read_state(settings)
    if state is None or ctx.api_url not in (None, "", f"{state.prefect}/api"):
        return None
    return SetupResult(env={"PREFECT_API_URL": f"{state.prefect}/api", **login_of(settings).for_prefect()})


def runs_a_deployment(command: Sequence[str]) -> bool:
    """Whether ``command`` is ``prefect ... deployment run ...``, however Prefect is called."""
    words = [Path(word).name for word in command]
    if "prefect" not in words:
        return False
    rest = words[words.index("prefect") + 1 :]
    return ("deployment", "run") in zip(rest, rest[1:], strict=False)


def accept_bare_names(commands: ModuleType) -> None:
    """Wrap the lookup of ``prefect.cli.deployment``; nothing happens where it is not the one that is known."""
    stock: Lookup | None = getattr(commands, "_get_deployment", None)
    if stock is None or list(inspect.signature(stock).parameters) != _KNOWN_ARGUMENTS:
        return

    async def lookup(client: PrefectClient, name: str | None, deployment_id: str | None) -> DeploymentResponse:
        if name is None or "/" in name or deployment_id is not None:
            return await stock(client, name, deployment_id)
        return await _only_one(client, name)

    commands._get_deployment = lookup  # type: ignore[attr-defined]


async def _only_one(client: PrefectClient, name: str) -> DeploymentResponse:
    from prefect.cli._utilities import exit_with_error
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    called_so = DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    found = await client.read_deployments(deployment_filter=called_so)
    if not found:
        exit_with_error(
            f"No deployment is called {name!r}; .venv/bin/prefect deployment ls lists them.", soft_wrap=True
        )
    if len(found) > 1:
        flows = sorted([(await client.read_flow(item.flow_id)).name for item in found])
        names = ", ".join(f"{flow}/{name}" for flow in flows)
        exit_with_error(
            f"{len(found)} deployments are called {name!r}; name one with its flow: {names}", soft_wrap=True
        )
    return found[0]
