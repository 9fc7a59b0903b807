"""Bring the policy's files into place: create the tiny one, fetch one by its id, or take a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prefect.context import TaskRunContext

from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import ModelRef
from rlcore.config import ModelConfig
from rlcore.specs import BootstrapSpec, tiny_folder
from tasks.driver.jobs import new_result_path, run_job
from tasks.retries import step
from tasks.store.made import cache_key, kept, present


def _key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    model: ModelConfig = parameters["model"]
    files = sorted(Path(model.path).glob("*")) if Path(model.path).is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    code = ("rlcore/jobs/bootstrap.py", "rlcore/models", "rlcore/families", "rlcore/data")
    return cache_key("model", json.dumps([model.model_dump(mode="json"), stamps]), *code)


@step(
    "bootstrap-policy",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer="json",
    others=(5, 60),
    timeout_seconds=6 * 3600,
)
def bootstrap(model: ModelConfig) -> ModelRef:
    """A local folder with config, safetensors, tokenizer and processor.

    Raises:
        ModelError: the model's files are missing or unusable.
    """
    settings = Settings()
    spec = BootstrapSpec(result=new_result_path(settings, "bootstrap"), model=model, models_dir=settings.models_dir)
    if model.path != "tiny":  # somebody else's folder, or the hub's
        return run_job("rlcore.jobs.bootstrap", spec, ModelRef, settings)
    # Made once: warmed up on another number of cores it would be another policy in its last bits.
    folder = tiny_folder(settings.models_dir, model.tiny)
    return kept(folder, settings, lambda: run_job("rlcore.jobs.bootstrap", spec, ModelRef, settings))


def bootstrapped(model: ModelConfig) -> ModelRef:
    found = present(bootstrap, lambda ref: Path(ref.path) / "config.json", model)
    get_logger().info("model: %s, %.1f M parameters, %s", found.source, found.num_parameters / 1e6, found.path)
    return found
