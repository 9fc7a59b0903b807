"""Thin Ray shells around the workers: one actor per rank, one GPU (or CPU core) each."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from rlcore.config import ExperimentConfig, ResourceConfig
from rlcore.distributed.blame import Failed, first_of, portable
from rlcore.distributed.worker import WorkerSpec
from rlcore.errors import MemoryExhaustedError, RlflowError, WorkerLostError
from rlcore.oom import oom_kills
from rlcore.stacks import dump_on_signal

_BLAME_SECONDS = 5.0  # in which a death shows that other ranks have already failed of


class WorkerActor:
    """Constructs, forwards, returns."""

    def address(self) -> tuple[str, int]:
        """This node's address with a free port, for rank 0 to host the rendezvous."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def pid(self) -> int:
        return os.getpid()

    def build(self, make: Callable[[WorkerSpec], object], spec: WorkerSpec, stacks: Path | None) -> Failed | None:
        self._rank = spec.rank
        if stacks is not None:
            dump_on_signal(stacks, f"rank-{spec.rank}", os.getpid())
        # imports and engine start make millions of objects that stay: looking through them again and again is a
        # third of the start-up time
        gc.disable()
        try:
            self._worker = make(spec)
        except Exception as error:  # noqa: BLE001 - the driver raises it, without Ray's wrapper
            return Failed.of(spec.rank, error)
        gc.freeze()
        gc.enable()
        return None

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._worker, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the driver raises it, without Ray's wrapper
            return Failed.of(self._rank, error)


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
        stacks: Path | None = None,
    ) -> None:
        """
        Args:
            make: builds what each actor holds; ``Worker`` for training.
            stacks: folder for the stacks of an actor that gets SIGUSR1.
        """
        self._oom_kills = oom_kills()
        self.size = size = config.resources.workers
        options: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 1}
        options["runtime_env"] = {"env_vars": worker_environment(device, config.resources)}
        actor = ray.remote(**options)(WorkerActor)
        self._actors = [actor.remote() for _ in range(size)]
        try:
            addresses: list[tuple[str, int]] = ray.get([a.address.remote() for a in self._actors])
            self.pids: list[int] = ray.get([a.pid.remote() for a in self._actors])
        except RayActorError as error:
            raise WorkerLostError(f"a worker ended while it started. Ray says: {str(error).strip()}") from None
        address, port = addresses[0]
        self._nodes = [node for node, _ in addresses]
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
        self._get([a.build.remote(make, spec, stacks) for a, spec in zip(self._actors, specs, strict=True)])

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._get([a.call.remote(method, *args) for a, args in zip(self._actors, arguments, strict=True)])

    def _get(self, references: list[Any]) -> list[Any]:
        """Results by rank; if some fail, the error of the one that failed first, although others may still wait in a
        collective."""
        ranks = {reference: rank for rank, reference in enumerate(references)}
        results: dict[int, Any] = {}
        pending = references
        while pending:
            (done,), pending = ray.wait(pending, num_returns=1)
            outcome = results[ranks[done]] = self._outcome(ranks[done], done)
            if isinstance(outcome, Failed):
                late = [] if outcome.died else _done_within(pending, _BLAME_SECONDS)
                others = [self._outcome(ranks[reference], reference) for reference in late]
                raise first_of([outcome, *(other for other in others if isinstance(other, Failed))]).raised()
        return [results[rank] for rank in range(len(references))]

    def _outcome(self, rank: int, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:  # outside of the worker's own code: an argument that cannot be read, say
            cause = portable(error.cause if isinstance(error.cause, Exception) else error)
            return Failed(rank, self._where(rank), time.time(), cause, str(error))
        except RayError as error:
            return Failed(rank, self._where(rank), time.time(), self._loss(rank, error), "", died=True)

    def _loss(self, rank: int, error: RayError) -> RlflowError:
        """What to raise for a process that is gone."""
        said = f"rank {rank} ({self._where(rank)}) is gone. Ray says: {type(error).__name__}: {str(error).strip()}"
        kills = oom_kills() - self._oom_kills
        if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
            return MemoryExhaustedError(f"{said}\nIts node was short of memory.")
        if kills > 0:
            return MemoryExhaustedError(f"{said}\nThe kernel has killed {kills} process(es) for memory meanwhile.")
        return WorkerLostError(said)

    def _where(self, rank: int) -> str:
        return f"pid {self.pids[rank]} on {self._nodes[rank]}"


def worker_environment(device: str, resources: ResourceConfig) -> dict[str, str]:
    """Read by OpenMP, torch, cuBLAS and vLLM when they load, so it has to be there before the actor's first import."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        threads = str(resources.threads_per_worker)
        quiet |= {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    elif resources.deterministic:
        quiet |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
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
        # A head of our own that died does not come back; by default its processes would look for it for a minute.
        _system_config=None if address else {"gcs_rpc_server_reconnect_timeout_s": 5},
    )


def stop_ray() -> None:
    """Leave the cluster; of a local one no process stays. Ray's agents would outlive it by some seconds."""
    children = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, alive = psutil.wait_procs(children, timeout=1.0)
    for process in alive:
        process.kill()


def _done_within(references: list[Any], seconds: float) -> list[Any]:
    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
    return list(done)
