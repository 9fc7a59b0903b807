"""The sharded train state on disk: written by any number of ranks, read by any other number, bit for bit.

``folder/train_state`` is a torch.distributed.checkpoint. Its keys are ``model.<name>`` with Hugging Face's
parameter names (a tied parameter once, under its first name), ``optimizer.<name>.<state>`` and ``groups``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from rlcore.errors import CheckpointError

TRAIN_STATE = "train_state"
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # torch.compile, activation checkpointing

OptimizerState = dict[str, dict[str, Tensor]]  # parameter name -> state name -> value


def save_train_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Write weights and optimizer state to ``folder/train_state``. Collective over all ranks.

    Raises:
        CheckpointError: the ranks hold optimizer states of different parameters.
    """
    names = _parameter_names(model)
    # Not get_optimizer_state_dict: where there is no state yet it takes an optimizer step to make one, and
    # Adam's bias correction would be off by that step ever after.
    state: OptimizerState = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    _require_same_on_all_ranks(sorted(f"{name}.{key}" for name, values in state.items() for key in values))
    groups = tuple(  # a tuple is stored as one value, a list would be taken apart
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    )
    tree = {"model": untied_tensors(model)[0], "optimizer": state, "groups": groups}
    with _quiet():
        dcp.save(tree, checkpoint_id=folder / TRAIN_STATE, no_dist=not dist.is_initialized())


def load_train_state(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Read what ``save_train_state`` wrote, on any number of ranks. Collective; replaces all state.

    Raises:
        CheckpointError: parameters, shapes, dtypes or optimizer groups differ from the checkpoint's.
    """
    stored = _stored_tensors(folder)
    weights, aliases = untied_tensors(model)
    _require_same_tensors(folder, stored, weights)
    parameters = {name: parameter for parameter, name in _parameter_names(model).items()}
    state = _empty_optimizer_state(stored, parameters)
    tree: dict[str, Any] = {"model": weights, "optimizer": state, "groups": ()}
    with _quiet():
        dcp.load(tree, checkpoint_id=folder / TRAIN_STATE, no_dist=not dist.is_initialized())
    set_model_state_dict(model, {**weights, **{alias: weights[name] for alias, name in aliases.items()}})
    _set_optimizer_state(optimizer, parameters, state, tree["groups"], folder)


def load_full_weights(folder: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint on CPU, by Hugging Face name; in one process, without a group."""
    stored = _stored_tensors(folder)
    weights = {
        key.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith("model.")
    }
    with _quiet():
        dcp.load({"model": weights}, checkpoint_id=folder / TRAIN_STATE, no_dist=True)
    return weights


def untied_tensors(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict with each tensor once; and for a tied parameter's further names, the one kept."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = _plain(raw)
        if parameter in first:
            aliases[name] = first[parameter]
        else:
            first[parameter] = name
    tensors = get_model_state_dict(model)
    return {name: value for name, value in tensors.items() if name not in aliases}, aliases


def _parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: _plain(name) for name, parameter in model.named_parameters()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    path = folder / TRAIN_STATE
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} holds no train state. Point to a committed checkpoint folder.")
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _require_same_tensors(
    folder: Path, stored: Mapping[str, TensorStorageMetadata], weights: Mapping[str, Tensor]
) -> None:
    found = {
        key.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith("model.")
    }
    wanted = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    different = [
        f"{name}: checkpoint {found[name]}, model {wanted[name]}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name] != wanted[name]  # torch.distributed.checkpoint would cast without a word
    ]
    if found.keys() != wanted.keys() or different:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this model. In the model only: "
            f"{_some(wanted.keys() - found.keys())}; in the checkpoint only: "
            f"{_some(found.keys() - wanted.keys())}; different: {_some(different)}. "
            "Load it with the model.path it was trained from."
        )


def _empty_optimizer_state(
    stored: Mapping[str, TensorStorageMetadata], parameters: Mapping[str, nn.Parameter]
) -> OptimizerState:
    """Tensors to load into: sharded as the parameter where they have its shape, else one copy per rank."""
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
    parameters: Mapping[str, nn.Parameter],
    state: OptimizerState,
    groups: Sequence[dict[str, Any]],
    folder: Path,
) -> None:
    names = {parameter: name for name, parameter in parameters.items()}
    mine = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    stored = [group["params"] for group in groups]
    if [sorted(group) for group in mine] != [sorted(group) for group in stored]:
        raise CheckpointError(
            f"the optimizer groups of {folder} hold {[len(group) for group in stored]} parameters, this "
            f"optimizer's {[len(group) for group in mine]}, or others. Build it over the same parameters."
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
                f"rank {rank} holds other optimizer states than rank 0: "
                f"{_some(set(theirs) ^ set(everyone[0]))}. Every rank has to step every parameter, or none."
            )


def _some(names: Iterable[str], limit: int = 5) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return (", ".join(listed[:limit]) or "none") + more


def _quiet() -> warnings.catch_warnings[None]:
    # One process without a process group is a normal case here, not one to warn about.
    return warnings.catch_warnings(action="ignore", category=UserWarning)
