"""Ray actors that hold the workers: one per rank, with one GPU (or CPU core) each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from rlcore.config import ExperimentConfig, ResourceConfig
from rlcore.distributed import placement
from rlcore.distributed.cluster import package_versions
from rlcore.distributed.placement import Listing, Seat
from rlcore.distributed.ranks import RankFailure, first_of, portable
from rlcore.distributed.worker import WorkerSpec
from rlcore.errors import MemoryExhaustedError, RlflowError, WorkerLostError
from rlcore.process import dump_on_signal, free_ports, making_what_stays, oom_kills

A = TypeVar("A")
R = TypeVar("R")

_CLOSE_SECONDS = 1.0  # ``close`` waits at most this long
_FAILURE_SECONDS = 5.0  # to wait for the reports of other ranks that failed for the same reason


class WorkerActor:
    """Builds a worker, and calls it for the driver."""

    def seat(self, shared: Mapping[Path, Listing]) -> Seat:
        """Where this actor runs, with two free ports in case it becomes rank 0."""
        first, second = free_ports(2)
        return Seat(_address(), (first, second), os.getpid(), package_versions(), placement.unseen(shared))

    def build(
        self, make: Callable[[WorkerSpec], object], spec: WorkerSpec, stacks: Path | None, several_nodes: bool
    ) -> RankFailure | None:
        self._rank = spec.rank
        if stacks is not None:
            dump_on_signal(stacks, f"rank-{spec.rank}", os.getpid())
        try:
            if several_nodes:
                for name, value in placement.network_variables(_address()).items():
                    os.environ.setdefault(name, value)
            with making_what_stays():
                self._worker = make(spec)
        except Exception as error:  # noqa: BLE001 - the driver raises it, without Ray's wrapper
            return RankFailure.of(spec.rank, error)
        return None

    def call(self, action: Callable[[Any, A], R], argument: A) -> R | RankFailure:
        try:
            return action(self._worker, argument)
        except Exception as error:  # noqa: BLE001 - the driver raises it, without Ray's wrapper
            return RankFailure.of(self._rank, error)

    def stream(self, action: Callable[[Any, A], Iterator[R]], argument: A) -> Iterator[R | RankFailure]:
        try:
            yield from action(self._worker, argument)
        except Exception as error:  # noqa: BLE001 - the driver raises it, without Ray's wrapper
            yield RankFailure.of(self._rank, error)


def start_ranks(
    make: Callable[[WorkerSpec], object],
    *,
    model: Path,
    dataset: Path,
    config: ExperimentConfig,
    device: str,
    stacks: Path | None = None,
    teacher: Path | None = None,
) -> RayRanks:
    """Start an actor for each rank, and wait until all have built their workers. Takes minutes.

    Args:
        make: builds the worker of an actor; ``make_worker`` for training.
        stacks: folder for the stack traces of an actor that receives SIGUSR1.
        teacher: folder of algorithm.teacher.
    """
    kills_before = oom_kills()
    group, sizes = placement.reserve(config, device), placement.bundle_sizes(config)
    options: dict[str, Any] = {"num_gpus": 1, "num_cpus": 1} if device == "cuda" else {"num_cpus": 1}
    options["runtime_env"] = {"env_vars": worker_environment(device, config.resources)}
    actor: Any = ray.remote(**options)(WorkerActor)
    actors = [actor.options(scheduling_strategy=each).remote() for each in placement.strategies(group, sizes)]
    folders = [folder for folder in (model, dataset, stacks, teacher) if folder is not None and folder.is_dir()]
    shared = {folder: placement.listing(folder) for folder in folders}
    try:
        seats: list[Seat] = ray.get([a.seat.remote(shared) for a in actors])
    except RayError as error:
        raise WorkerLostError(f"a worker ended while it started. Ray says: {str(error).strip()}") from None
    placement.check_seats(seats)
    order = placement.by_node([seat.address for seat in seats], sizes, config.resources.workers)
    ranks = RayRanks([actors[i] for i in order], [seats[i] for i in order], kills_before)
    specs = worker_specs(ranks.seats, config, model=model, dataset=dataset, device=device, teacher=teacher)
    ranks.build(make, specs, stacks)
    return ranks


class RayRanks:
    """The ranks as Ray actors. Implements ``Ranks``."""

    def __init__(self, actors: Sequence[Any], seats: Sequence[Seat], kills_before: int) -> None:
        """
        Args:
            kills_before: number of processes that this machine's kernel had killed for memory before the start.
        """
        self._actors, self.seats, self._oom_kills = actors, seats, kills_before
        self._streaming, self._closed = threading.Lock(), False
        self.size = len(actors)

    def build(
        self, make: Callable[[WorkerSpec], object], specs: Sequence[WorkerSpec], stacks: Path | None = None
    ) -> None:
        """Build each actor's worker. Call it first."""
        several = len({seat.address for seat in self.seats}) > 1
        self._get([a.build.remote(make, spec, stacks, several) for a, spec in zip(self._actors, specs, strict=True)])

    @property
    def pids(self) -> list[int]:
        """Of each rank, on its node."""
        return [seat.pid for seat in self.seats]

    def call(self, action: Callable[[Any, A], R], arguments: Sequence[A], first: int = 0) -> list[R]:
        actors = self._actors[first : first + len(arguments)]
        return self._get([a.call.remote(action, own) for a, own in zip(actors, arguments, strict=True)], first)

    def stream(
        self, action: Callable[[Any, A], Iterator[R]], arguments: Sequence[A], first: int = 0
    ) -> Iterator[tuple[int, R]]:
        actors = self._actors[first : first + len(arguments)]
        streams = {
            actor.stream.options(num_returns="streaming").remote(action, own): place
            for place, (actor, own) in enumerate(zip(actors, arguments, strict=True))
        }
        while streams:
            with self._streaming:
                if self._closed:
                    raise WorkerLostError("the ranks were closed while they were still sampling")
                ready, _ = ray.wait(list(streams), num_returns=1, timeout=_CLOSE_SECONDS)
                if not ready:
                    continue
                place, reference = streams[ready[0]], next(cast(Any, ready[0]), None)
                if reference is None:  # the stream has ended
                    del streams[ready[0]]
                    continue
                outcome = self._outcome(first + place, reference)
            if isinstance(outcome, RankFailure):
                raise outcome.raised()
            yield place, outcome

    def close(self) -> None:
        """End the streams of other threads. Call it before ``stop_ray``: such a thread would start Ray again."""
        self._closed = True
        with self._streaming:  # wait until such a thread is about to check ``_closed``
            pass

    def _get(self, references: list[Any], first: int = 0) -> list[Any]:
        """Results in order, starting with rank ``first``.

        Raises the error of the rank that failed first, without waiting for ranks that hang in a collective.
        """
        ranks = {reference: rank for rank, reference in enumerate(references, first)}
        results: dict[int, Any] = {}
        pending = references
        while pending:
            (done,), pending = ray.wait(pending, num_returns=1)
            outcome = results[ranks[done]] = self._outcome(ranks[done], done)
            if isinstance(outcome, RankFailure):
                late = [] if outcome.died else _done_within(pending, _FAILURE_SECONDS)
                others = [self._outcome(ranks[reference], reference) for reference in late]
                raise first_of([outcome, *(other for other in others if isinstance(other, RankFailure))]).raised()
        return [results[rank] for rank in ranks.values()]

    def _outcome(self, rank: int, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:  # outside the worker's code, for example an argument that cannot be unpickled
            cause = portable(error.cause if isinstance(error.cause, Exception) else error)
            return RankFailure(rank, self._where(rank), time.time(), cause, str(error))
        except RayError as error:
            return RankFailure(rank, self._where(rank), time.time(), self._loss(rank, error), "", died=True)

    def _loss(self, rank: int, error: RayError) -> RlflowError:
        """The error to raise for a process that died."""
        lost = f"rank {rank} ({self._where(rank)}) is gone. Ray says: {type(error).__name__}: {str(error).strip()}"
        here = self.seats[rank].address == _address()
        kills = oom_kills() - self._oom_kills if here else 0  # another node's kernel has its own count
        if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
            return MemoryExhaustedError(f"{lost}\nIts node was short of memory.")
        if kills > 0:
            return MemoryExhaustedError(f"{lost}\nMeanwhile the kernel has killed {kills} process(es) for memory.")
        return WorkerLostError(lost)

    def _where(self, rank: int) -> str:
        return f"pid {self.seats[rank].pid} on {self.seats[rank].address}"


def worker_specs(
    seats: Sequence[Seat],
    config: ExperimentConfig,
    *,
    model: Path,
    dataset: Path,
    device: str,
    teacher: Path | None = None,
) -> list[WorkerSpec]:
    """What each rank needs to build itself and to connect to the others. ``seats`` are ordered by rank."""
    engine = config.rollout.tensor_parallel
    return [
        WorkerSpec(
            rank=rank,
            world_size=config.resources.workers,
            local_rank=0,  # each process sees only its own device
            device=device,
            threads=config.resources.threads_per_worker,
            master_address=seats[0].address,
            master_port=seats[0].ports[0],
            model=model,
            dataset=dataset,
            config=config,
            channel_port=seats[0].ports[1],
            engine_address=seats[rank - rank % engine].address,
            engine_port=seats[rank - rank % engine].ports[0],
            teacher=teacher,
        )
        for rank in range(len(seats))
    ]


def worker_environment(device: str, resources: ResourceConfig) -> dict[str, str]:
    """Variables that OpenMP, torch, cuBLAS and vLLM read when they load: set them before the actor's first import."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        threads = str(resources.threads_per_worker)
        quiet |= {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
    elif resources.deterministic:
        quiet |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return quiet


def _address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _done_within(references: list[Any], seconds: float) -> list[Any]:
    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
    return list(done)
