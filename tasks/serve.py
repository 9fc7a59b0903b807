"""``rlflow serve``: vLLM's OpenAI-compatible server of a model, with the prompts and limits of its run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infra import environment
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.errors import ConfigError
from rlcore.files import write_json_atomically
from rlcore.specs import ServeSpec
from tasks.driver.jobs import new_result_path, tell_shortage
from tasks.named import find_named

_SHARE = 0.9  # of a GPU that nothing else uses


def serve_spec(
    words: str,
    settings: Settings,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    key_variable: str | None = None,
    plain: bool = False,
    further: Sequence[str] = (),
) -> ServeSpec:
    """The server of the model that ``words`` names.

    Raises:
        ConfigError: there is no such model, or the variable of the key is not set.
    """
    if key_variable is not None and not os.environ.get(key_variable):
        raise ConfigError(f"the variable {key_variable} is not set or empty: put the key for clients there.")
    model = find_named(words, settings)
    return ServeSpec(
        result=new_result_path(settings, "serve"),
        experiment=model.experiment,
        model=str(model.folder),
        checkpoint=model.adapters,
        name=name or model.name,
        host=host,
        port=port,
        key_variable=key_variable,
        plain=plain,
        gpu_memory_utilization=_SHARE,
        words=tuple(further),
    )


def become_server(spec: ServeSpec, settings: Settings) -> None:
    """Replace this process by the server, so that Ctrl-C and signals reach it directly."""
    path = spec.result.with_name("spec.json")
    write_json_atomically(path, spec.model_dump_json(indent=1))
    get_logger().info("serve: %s as %s at http://%s:%d/v1", spec.model, spec.name, spec.host, spec.port)
    tell_shortage("serve", spec.experiment, spec.experiment.rollout.tensor_parallel, settings)
    python = str(settings.trainer_python)
    os.execve(python, [python, "-m", "rlcore.jobs.serve", str(path)], environment.for_jobs(settings))
