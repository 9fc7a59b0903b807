"""Thin Ray shells around the workers: one actor per rank, one GPU (or CPU core) each."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError

from rlcore.config import ExperimentConfig
from rlcore.distributed.worker import WorkerSpec


class WorkerActor:
    """Constructs, forwards, returns."""

    def address(self) -> tuple[str, int]:
        """This node's address with a free port, for rank 0 to host the rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def pid(self) -> int:
        return os.getpid()

    def build(self, make: Callable[[WorkerSpec], object], spec: WorkerSpec) -> None:
        # imports and engine start make millions of objects that stay: looking through them again and again is a
        # third of the start-up time
        gc.disable()
        self._worker = make(spec)
        gc.freeze()
        gc.enable()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)


class RayRanks:
    """The ranks as Ray actors. Implements ``Ranks``."""

    def __init__(
        self,
        make: Callable[[WorkerSpec], object],
        *,
        model: Path,
        dataset: Path,
        config: ExperimentConfig,
        device: str,
    ) -> None:
        """
        Args:
            make: builds what each actor holds; ``Worker`` for training.
        """
        self.size = size = config.resources.workers
        options: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        options["runtime_env"] = {"env_vars": worker_environment(device, config.resources.threads_per_worker)}
        actor = ray.remote(**options)(WorkerActor)
        self._actors = [actor.remote() for _ in range(size)]
        address, port = ray.get(self._actors[0].address.remote())
        self.pids: list[int] = ray.get([a.pid.remote() for a in self._actors])
        specs = [
            WorkerSpec(
                rank=rank,
                world_size=size,
                local_rank=0,  # Ray shows each actor its own device only
                device=device,
                threads=config.resources.threads_per_worker,
                master_address=address,
                master_port=port,
                model=model,
                dataset=dataset,
                config=config,
            )
            for rank in range(size)
        ]
        _get([a.build.remote(make, spec) for a, spec in zip(self._actors, specs, strict=True)])

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return _get([a.call.remote(method, *args) for a, args in zip(self._actors, arguments, strict=True)])


def worker_environment(device: str, threads: int) -> dict[str, str]:
    """Read by OpenMP, torch and vLLM when they load, so it has to be there before the actor's first import."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        quiet |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    return quiet


def start_ray(address: str | None, num_cpus: int) -> None:
    """Join a cluster, or start a local one that ends with this process."""
    ray.init(
        address=address,
        num_cpus=None if address else num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
    )


def stop_ray() -> None:
    """Leave the cluster; of a local one no process stays. Ray's agents would outlive it by some seconds."""
    children = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(children, timeout=1.0)
    for process in alive:
        process.kill()


def _get(references: list[Any]) -> list[Any]:
    """Results of all ranks; if one fails, its own exception at once, although the others may wait in a collective."""
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        try:
            ray.get(done)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
    return ray.get(references)
