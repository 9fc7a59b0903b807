"""The sharded train state on disk: written by any number of ranks, read by any other number, bit for bit.

``folder/train_state`` is a torch.distributed.checkpoint. Its keys are ``model.<name>`` with Hugging Face's parameter
names (a tied parameter once, under its first name), ``optimizer.<name>.<state>`` and ``groups``. For a model with
adapters it holds ``lora.alpha`` and the adapters only (``rlcore.models.lora``): the base weights are in the model
folder that the run started from.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlcore.errors import CheckpointError, StorageError
from rlcore.models.lora import is_adapter, lora_alpha
from rlcore.models.sharding import local_part, plain_name, tied_aliases

logger = logging.getLogger(__name__)
TRAIN_STATE = "train_state"
ALPHA = "lora.alpha"

_FILE_BYTES, _MOST_FILES = 2 << 30, 8  # a rank's part is split into files of about this size, at most so many
_LARGE = 1 << 20  # bytes: below, page-locking costs little
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context

OptimizerState = dict[str, dict[str, Tensor]]  # parameter name -> state name -> value


class BackgroundSaver:
    """Writes train states in the background, one at a time. All ranks build and call it in the same order."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="save")
        # a separate group, because its collectives run concurrently with those of training
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writing: Future[None] | None = None
        self._reserving: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}  # host memory by name, reused by the next save

    def begin(self, model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
        """Copy the weights, or only adapters if there are any, and the optimizer state to host memory. Start to write
        the copy to ``folder/train_state``. Collective over all ranks.

        Raises:
            CheckpointError: the last save is not ``done``, or the ranks have optimizer states of different parameters.
        """
        if not self.done():
            raise CheckpointError(f"{folder}: the last save is still being written. Wait until done() is True.")
        if self._reserving is not None:
            self._reserving.result()
        copied = self._on_host("", _train_state(model, optimizer))
        self._writing = self._executor.submit(_write, copied, folder, self._group)

    def reserve(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Allocate the host memory of the saves in the background. It takes seconds for a large model, and the first
        ``begin`` would wait for it. Collective over all ranks."""
        self._reserving = self._executor.submit(self._allocate, "", _train_state(model, optimizer))

    def _allocate(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                self._allocate(f"{name}.{key}", item)
        elif isinstance(value, Tensor):
            self._buffer(name, local_part(value))

    def done(self) -> bool:
        """Whether the last save is written: this rank's part and the common metadata.

        Raises:
            StorageError: some rank could not write it.
        """
        if self._writing is None or not self._writing.done():
            return self._writing is None
        self._writing.result()
        return True

    def _on_host(self, name: str, value: Any) -> Any:
        """A copy of a tree of tensors in this saver's host memory. Sharded tensors stay sharded."""
        if isinstance(value, dict):
            return {key: self._on_host(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, DTensor):
            local = self._on_host(name, value.to_local())
            return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        if not isinstance(value, Tensor):
            return value
        return self._buffer(name, value).copy_(value.detach())

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = _host_memory(like)
        return buffer


def _host_memory(like: Tensor) -> Tensor:
    """A tensor on the host with this shape and dtype. For a GPU's tensor it is page-locked, so that copies are many
    times faster."""
    if not like.is_cuda or like.nbytes < _LARGE:
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
    return page_locked(like, torch.cuda.cudart())  # type: ignore[no-untyped-call]


def page_locked(like: Tensor, runtime: Any) -> Tensor:
    """Zeros in page-locked memory, with the shape and dtype of ``like``.

    Other CUDA calls of the process wait while memory is page-locked. Most of that time goes into making the pages, so
    they are made first.

    Args:
        runtime: ``torch.cuda.cudart()``.
    """
    pages = mmap.mmap(-1, like.nbytes)
    pages.madvise(mmap.MADV_HUGEPAGE)  # a five-hundredth as many to make and to lock
    # Its finalizer runs before the pages are unmapped, and that of ``pages`` would run afterwards. CUDA would then take
    # what is mapped there next for page-locked, and refuse to copy from it ("invalid argument").
    memory = (ctypes.c_char * like.nbytes).from_buffer(pages)
    made = torch.frombuffer(memory, dtype=like.dtype).view(like.shape).zero_()
    error = runtime.cudaHostRegister(made.data_ptr(), made.nbytes, _PORTABLE)
    if int(error) != 0:
        logger.warning("%d MiB of the host are not page-locked, so saves are slower: %s", made.nbytes >> 20, error)
        return made
    weakref.finalize(memory, runtime.cudaHostUnregister, made.data_ptr()).atexit = False
    return made


def _train_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = _parameter_names(model)
    # get_optimizer_state_dict takes an optimizer step to create missing state, and from then on Adam's bias
    # correction would be off by one step
    state: OptimizerState = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    _require_same_on_all_ranks(sorted(f"{name}.{key}" for name, values in state.items() for key in values))
    groups = tuple(  # stored as one value; the elements of a list would be stored separately
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    )
    return {"model": _own_tensors(model)[0], "optimizer": state, "groups": groups, "lora": _lora(model)}


def _write(tree: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    try:
        with _quiet():
            write_checkpoint(
                tree,
                storage_writer=FileSystemWriter(folder / TRAIN_STATE, thread_count=_number_of_files(tree)),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:  # a BaseException with the tracebacks of all ranks as its text
        rank, (cause, _) = next(iter(error.failures.items()))
        raise StorageError(
            f"rank {rank} could not write its part of {folder / TRAIN_STATE}: {type(cause).__name__}: {cause}"
        ) from error


def _number_of_files(tree: Any) -> int:
    """Files of this rank's part. Several are written, and later hashed, at the same time."""
    return min(_MOST_FILES, 1 + _local_bytes(tree) // _FILE_BYTES)


def _local_bytes(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_local_bytes(value) for value in tree.values())
    return local_part(tree).nbytes if isinstance(tree, Tensor) else 0


def load_train_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Replace weights and optimizer state by those of a checkpoint, written by any number of ranks. Collective.

    Raises:
        CheckpointError: parameters, shapes, dtypes, alpha or optimizer groups differ from the checkpoint's.
    """
    stored = stored_tensors(folder)
    weights, aliases = _own_tensors(model)
    _require_same_tensors(folder, stored, weights)
    parameters = {name: parameter for parameter, name in _parameter_names(model).items()}
    state = _empty_optimizer_state(stored, parameters)
    lora = _lora(model)
    tree: dict[str, Any] = {"model": weights, "optimizer": state, "groups": (), "lora": lora}
    with _quiet():
        read_checkpoint(tree, storage_reader=_Reader(folder / TRAIN_STATE), no_dist=not dist.is_initialized())
    if lora and float(lora["alpha"]) != lora_alpha(model):
        raise CheckpointError(
            f"{folder} was trained with model.lora.alpha {float(lora['alpha']):g}, the model has "
            f"{lora_alpha(model):g}: the same adapters would be another policy. Set model.lora.alpha back."
        )
    whole = {**weights, **{alias: weights[name] for alias, name in aliases.items()}}
    set_model_state_dict(model, whole, options=StateDictOptions(strict=not lora))
    _set_optimizer_state(optimizer, parameters, state, tree["groups"], folder)


def _own_tensors(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors in a checkpoint of the model: its adapters if it has any, else all, each once; and the aliases."""
    tensors, aliases = untied_tensors(model)
    if lora_alpha(model) is None:
        return tensors, aliases
    return {name: value for name, value in tensors.items() if is_adapter(name)}, {}


def _lora(model: nn.Module) -> dict[str, Tensor]:
    alpha = lora_alpha(model)
    return {} if alpha is None else {"alpha": torch.tensor(alpha, dtype=torch.float64)}


def untied_tensors(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict with each tensor once; and the other names of tied parameters -> their name in it."""
    tensors, aliases = get_model_state_dict(model), tied_aliases(model)
    return {name: value for name, value in tensors.items() if name not in aliases}, aliases


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def read_tensors(folder: Path, tree: dict[str, Any]) -> None:
    """Fill the tensors of ``tree`` from a train state. Needs no process group."""
    with _quiet():
        read_checkpoint(tree, storage_reader=_Reader(folder / TRAIN_STATE), no_dist=True)


class _Reader(FileSystemReader):
    """Reads the files of a part at the same time."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        read = super().read_data
        with ThreadPoolExecutor(_MOST_FILES, thread_name_prefix="load") as pool:
            for reading in [pool.submit(read, replace(plan, items=items), planner) for items in files.values()]:
                reading.result()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a train state by key.

    Raises:
        CheckpointError: there is none.
    """
    path = folder / TRAIN_STATE
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} holds no train state. Choose the folder of a committed checkpoint.")
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _require_same_tensors(
    folder: Path, stored: Mapping[str, TensorStorageMetadata], weights: Mapping[str, Tensor]
) -> None:
    saved = {
        key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith("model.")
    }
    expected = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    different = [
        f"{name}: checkpoint {saved[name]}, model {expected[name]}"
        for name in sorted(saved.keys() & expected.keys())
        if saved[name] != expected[name]  # torch.distributed.checkpoint would cast silently
    ]
    if saved.keys() != expected.keys() or different:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this model. In the model only: "
            f"{some(expected.keys() - saved.keys())}; in the checkpoint only: "
            f"{some(saved.keys() - expected.keys())}; different: {some(different)}. "
            "Load it with the model.path, model.lora and training.optimizer of its run."
        )


def _empty_optimizer_state(
    stored: Mapping[str, TensorStorageMetadata], parameters: Mapping[str, Tensor]
) -> OptimizerState:
    """Tensors to load into: sharded like the parameter if they have its shape, else one copy per rank."""
    state: OptimizerState = {}
    for key, entry in stored.items():
        if not key.startswith("optimizer."):
            continue
        name, _, part = key.removeprefix("optimizer.").rpartition(".")
        parameter = parameters[name].detach()
        if tuple(entry.size) == tuple(parameter.shape) and parameter.dim() > 0:
            value = torch.zeros_like(parameter, dtype=entry.properties.dtype)
        else:
            value = torch.zeros(entry.size, dtype=entry.properties.dtype)
        state.setdefault(name, {})[part] = value
    return state


def _set_optimizer_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    state: OptimizerState,
    groups: Sequence[dict[str, Any]],
    folder: Path,
) -> None:
    names = {parameter: name for name, parameter in parameters.items()}
    mine = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in groups]
    if [sorted(group) for group in mine] != [sorted(group) for group in stored]:
        raise CheckpointError(
            f"the optimizer groups of {folder} hold {[len(group) for group in stored]} parameters, those of this "
            f"optimizer {[len(group) for group in mine]}, or different ones. Build it over the same parameters."
        )
    index = {name: position for position, name in enumerate(name for group in mine for name in group)}
    optimizer.load_state_dict(
        {
            "state": {index[name]: values for name, values in state.items()},
            "param_groups": [
                {**group, "params": [index[name] for name in own]} for group, own in zip(groups, mine, strict=True)
            ],
        }
    )


def _require_same_on_all_ranks(keys: list[str]) -> None:
    if not dist.is_initialized():
        return
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, keys)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise CheckpointError(
                f"rank {rank} has other optimizer states than rank 0: "
                f"{some(set(theirs) ^ set(everyone[0]))}. Either all ranks or none must step a parameter."
            )


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first names, sorted, and the number of others, for an error message."""
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more


def _quiet() -> AbstractContextManager[None]:
    # torch warns about a process without a group, which is a normal case here. With a group it does not warn, and a
    # background thread must not change the process's filters
    return nullcontext() if dist.is_initialized() else warnings.catch_warnings(action="ignore", category=UserWarning)
