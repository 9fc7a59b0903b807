"""Which rank goes where, and what is said of a node that does not fit."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.distributed.cluster import package_versions, steering
from rlcore.distributed.placement import (
    Seat,
    bundle_sizes,
    by_node,
    check_seats,
    listing,
    network_variables,
    unseen,
)
from rlcore.errors import ConfigError


def experiment(workers: int, together: int, samplers: int, engine: int = 1) -> ExperimentConfig:
    return build_experiment(
        {"name": "test"},
        [
            f"resources.workers={workers}",
            f"resources.rollout_workers={samplers}",
            f"training.sequence_parallel={together}",
            f"rollout.tensor_parallel={engine}",
        ],
    )


def seat(address: str = "10.0.0.2", *, unseen: tuple[str, ...] = (), **packages: str) -> Seat:
    return Seat(address, (1, 2), 3, {**package_versions(), **packages}, unseen)


def test_ranks_that_compute_a_row_together_are_one_bundle() -> None:
    assert bundle_sizes(experiment(8, 1, 0)) == [1] * 8
    assert bundle_sizes(experiment(8, 4, 2)) == [4, 4, 1, 1]


def test_ranks_that_hold_an_engine_together_are_one_bundle() -> None:
    assert bundle_sizes(experiment(8, 1, 0, engine=4)) == [4, 4]
    assert bundle_sizes(experiment(8, 4, 0, engine=2)) == [4, 4]
    assert bundle_sizes(experiment(16, 2, 0, engine=8)) == [8, 8]
    assert bundle_sizes(experiment(8, 1, 4, engine=2)) == [1] * 8 + [2, 2]


def test_ranks_of_a_node_become_neighbours() -> None:
    nodes = ["b", "a", "b", "a", "a", "b"]  # as placed; the last two only sample
    order = by_node(nodes, [1] * 6, trainers=4)
    assert order == [0, 2, 1, 3, 5, 4]
    assert [nodes[i] for i in order] == ["b", "b", "a", "a", "b", "a"]


def test_a_bundle_stays_whole_and_in_order() -> None:
    order = by_node(["a", "a", "b", "b", "a", "a"], [2, 2, 2], trainers=6)
    assert order == [0, 1, 4, 5, 2, 3]


def test_a_folder_that_lacks_files_is_reported(tmp_path: Path) -> None:
    for name in ("same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("12")
    there = {tmp_path / name: listing(tmp_path / name) for name in ("same", "other")}
    there[tmp_path / "absent"] = frozenset()
    assert unseen({tmp_path / "same": there[tmp_path / "same"]}, seconds=0) == ()
    (tmp_path / "other" / "file").rename(tmp_path / "other" / "another")
    (tmp_path / "same" / "another").touch()  # more is no harm
    assert unseen(there, seconds=0) == (str(tmp_path / "other"), str(tmp_path / "absent"))


def test_a_node_without_the_folders_or_with_other_packages_is_refused() -> None:
    check_seats([seat(), seat("10.0.0.3")])
    with pytest.raises(ConfigError, match=r"the node 10\.0\.0\.3 does not see the files in /data/x\."):
        check_seats([seat(), seat("10.0.0.3", unseen=("/data/x",))])
    here = package_versions()["torch"]
    with pytest.raises(ConfigError, match=rf"10\.0\.0\.2 has torch 1\.0 \(here {here}\)\. Install the same"):
        check_seats([seat(torch="1.0")])


def test_the_network_interface_is_that_of_rays_address() -> None:
    (loopback,) = [
        name
        for name, found in psutil.net_if_addrs().items()
        if any(one.family == socket.AF_INET and one.address == "127.0.0.1" for one in found)
    ]
    assert network_variables("127.0.0.1")["GLOO_SOCKET_IFNAME"] == loopback
    with pytest.raises(ConfigError, match=r"node is 192\.0\.2\.77, and no network interface here has that"):
        network_variables("192.0.2.77")


def test_variables_that_change_results_are_sent_and_secrets_are_not() -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth7",  # of one machine
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_API_KEY": "secret",
        "VLLM_HOST_IP": "10.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "secret",
        "HOME": "/root",
    }
    assert steering(variables) == {"NCCL_DEBUG": "INFO", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "HF_HUB_OFFLINE": "1"}
