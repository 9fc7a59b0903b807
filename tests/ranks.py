"""Processes that tests start many of, forked from one that has imported torch, transformers and vLLM: these imports are
most of what such a process would do."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from rlcore.models.sharding import gather_whole

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.preloaded"])


def on_ranks(world: int, measure: Callable[..., None], *arguments: Any) -> None:
    """Call ``measure(rank, world, *arguments)`` on each rank of a gloo world; raises what one of them raises."""
    with tempfile.TemporaryDirectory() as folder:  # they meet at a file, since a port could be taken meanwhile
        meeting = f"file://{folder}/ranks"
        mp.start_processes(_joined, (world, meeting, measure, arguments), nprocs=world, start_method="forkserver")


def _joined(rank: int, world: int, meeting: str, measure: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    measure(rank, world, *arguments)
    dist.barrier()
    # Not through finalisation: a gloo thread that drops its last work there needs the GIL, is ended by
    # Python 3.11 instead of getting it, and takes the process down with SIGABRT, one time in five.
    os._exit(0)


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, from the shards of all ranks if it is sharded.

    ``DTensor.full_tensor()`` would do the same with torch's functional collectives. With gloo these can free a tensor
    twice: a rank that gathered 2,500 gradients in that way ended once with SIGSEGV, in the destructor of a collective
    that had ended (torch 2.13).
    """
    ((_, value),) = gather_whole([("", tensor)], None, bucket_bytes=1)
    return value.detach().clone()
