"""Where the ranks run: a bundle of devices for ranks that must share a node, and neighbouring ranks on one node."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore.config import ExperimentConfig
from rlcore.distributed.cluster import package_versions
from rlcore.errors import ConfigError, WorkerLostError

_SEEN_SECONDS = 20.0  # until another node sees new files in a shared folder
_POLL_SECONDS = 0.2
_AT_ONCE_SECONDS = 5.0  # longer than Ray needs if devices are free

logger = logging.getLogger(__name__)

Listing = frozenset[str]  # names in a folder


@dataclass(frozen=True, slots=True)
class Seat:
    """The node of one rank, as its process sees it."""

    address: str
    ports: tuple[int, int]  # free
    pid: int
    packages: Mapping[str, str]  # versions by name
    unseen: tuple[str, ...]  # shared folders whose files this node does not see


def bundle_sizes(config: ExperimentConfig) -> list[int]:
    """Number of ranks in each bundle. Ray never splits a bundle over nodes.

    Ranks that compute a row together (Ulysses) or hold one engine together (tensor parallelism) exchange activations in
    every layer, so they must share a node.
    """
    row, engine, resources = config.training.sequence_parallel, config.rollout.tensor_parallel, config.resources
    trainers = row if resources.rollout_workers else math.lcm(row, engine)
    return [trainers] * (resources.workers // trainers) + [engine] * (resources.rollout_workers // engine)


def reserve(config: ExperimentConfig, device: str) -> PlacementGroup:
    """Reserve devices for all ranks or for none, on as few nodes as possible, because neighbours communicate most.

    Held until this process disconnects from Ray, including on a crash.

    Raises:
        WorkerLostError: the devices are not all free within ``resources.wait_minutes``.
    """
    each = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    bundles = [{name: float(count * size) for name, count in each.items()} for size in bundle_sizes(config)]
    group: PlacementGroup = placement_group(bundles, strategy="PACK")
    if group.wait(_AT_ONCE_SECONDS):
        return group
    logger.warning("Ray has no room for %d worker(s) yet. Its nodes: %s", config.resources.devices, _nodes())
    if group.wait(60 * config.resources.wait_minutes):
        return group
    remove_placement_group(group)
    together = max(bundle_sizes(config))
    shared = f", {together} workers on one node" if together > 1 else ""
    raise WorkerLostError(
        f"Ray has had no room for {config.resources.devices} worker(s) for {config.resources.wait_minutes:g} minutes: "
        f"each takes {' and '.join(f'{count} {name}' for name, count in each.items())}{shared}. Its nodes: {_nodes()}. "
        "Add nodes, stop other jobs, lower resources.workers, or raise resources.wait_minutes."
    )


def strategies(group: PlacementGroup, sizes: Sequence[int]) -> list[PlacementGroupSchedulingStrategy]:
    """Ray's placement of each rank in its bundle."""
    return [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        for index, size in enumerate(sizes)
        for _ in range(size)
    ]


def by_node(nodes: Sequence[str], sizes: Sequence[int], trainers: int) -> list[int]:
    """An order in which the ranks of a node are consecutive. Bundles stay whole, and ranks that train come first.

    Args:
        nodes: of each rank, in the order of creation.
        sizes: number of ranks in each bundle.
        trainers: number of ranks that train.
    """
    first_seen = {node: index for index, node in reversed(list(enumerate(nodes)))}
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    bundles = sorted(
        zip(starts, sizes, strict=True), key=lambda item: (item[0] >= trainers, first_seen[nodes[item[0]]], item[0])
    )
    return [start + offset for start, size in bundles for offset in range(size)]


def listing(folder: Path) -> Listing:
    return frozenset(entry.name for entry in folder.iterdir())


def unseen(expected: Mapping[Path, Listing], seconds: float = _SEEN_SECONDS) -> tuple[str, ...]:
    """The folders in which this node still misses some of the ``expected`` names after ``seconds``."""
    deadline = time.monotonic() + seconds
    while missing := tuple(str(folder) for folder, names in expected.items() if not _holds(folder, names)):
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return missing


def _holds(folder: Path, names: Listing) -> bool:
    try:
        return names <= listing(folder)
    except OSError:
        return False  # missing or not readable


def check_seats(seats: Sequence[Seat]) -> None:
    """
    Raises:
        ConfigError: a node lacks a folder or has other packages than the driver.
    """
    ours = package_versions()
    for seat in seats:
        if seat.unseen:
            raise ConfigError(
                f"the node {seat.address} does not see the files in {', '.join(seat.unseen)}. All nodes of a Ray "
                "cluster must mount the same storage at the same path. Set RLFLOW_DATA_DIR to a folder there, and "
                "model.path too if it is a folder."
            )
        if differing := sorted(name for name in {*ours, *seat.packages} if ours.get(name) != seat.packages.get(name)):
            listed = ", ".join(f"{name} {seat.packages.get(name)} (here {ours.get(name)})" for name in differing)
            raise ConfigError(f"the node {seat.address} has {listed}. Install the same versions on every node.")


def network_variables(address: str) -> dict[str, str]:
    """Variables that make gloo, NCCL and vLLM use the interface of Ray's nodes, for ranks on several nodes.

    gloo would use the address of the host's name, which is often a loopback address.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "VLLM_HOST_IP": address}
    raise ConfigError(
        f"Ray says that this node is {address}, and no network interface here has that address. Start the node with "
        "ray start --node-ip-address and an address of this node that the other nodes reach."
    )


def _nodes() -> str:
    nodes = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        has = {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU") if name in node.get("Resources", {})}
        state = ", ".join(f"{value:g} {name}" for name, value in has.items()) if node["Alive"] else "dead"
        nodes.append(f"{node['NodeManagerAddress']} ({state or 'no devices'})")
    return "; ".join(nodes)
