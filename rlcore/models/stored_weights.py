"""Weights of a Hugging Face folder, read tensor by tensor, and parameters on the meta device that get values from them.

No process ever holds the whole model: a rank reads only its own rows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlcore.errors import ModelError
from rlcore.models.loading import published
from rlcore.models.sharding import own_rows, tied_aliases

Values = Callable[[str, slice], Tensor]  # a name of the state dict and rows -> these rows of the tensor

_ALL = slice(None)


@dataclass(slots=True)
class _Source:
    """Stored tensors that become one or more tensors of the model."""

    first: str  # the name that transformers' renaming gives: one of the tensors of the model
    converter: WeightConverter | None  # None: one tensor, stored as it is
    stored: list[tuple[str, str]] = field(default_factory=list)  # stored name, and the converter's pattern for it


class StoredWeights:
    """The tensors of a model folder by their names in transformers' model, in the dtype in which they are stored.

    transformers' own renamings and converters (its ``conversion_mapping``) map the names. A converted tensor is read
    whole.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        """
        Args:
            model: the folder's architecture, from ``empty_hf_model``, not yet sharded: names are mapped by its class.

        Raises:
            ModelError: no safetensors, an unreadable file, or missing, unexpected or mismatched tensors.
        """
        self.folder = folder
        self._model = model
        self._open = lru_cache(maxsize=1)(partial(safe_open, framework="pt"))
        self._convert = lru_cache(maxsize=1)(self._converted)  # a model reads a source's tensors one after the other
        self._files = self._find_files()
        self._transforms: list[Any] = get_model_conversion_mapping(model)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        sources, unexpected = self._plan(shapes)
        self._sources: dict[str, _Source] = {}  # by each name that it yields
        found: dict[str, tuple[int, ...]] = {}
        for source in sources:
            for name, value in self._yielded(source, self._empty).items():
                self._sources[name] = source
                found[name] = tuple(value.shape)
        self._twins = {}  # tied names that are not stored -> the name that is
        for alias, name in tied_aliases(model).items():
            stored, other = (name, alias) if name in self._sources else (alias, name)
            if stored in self._sources and other not in self._sources:
                self._twins[other] = stored
        self._require_exactly(shapes, found, unexpected)

    def _find_files(self) -> dict[str, Path]:
        """The file of each stored tensor."""
        index, whole = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if not whole.is_file() and index.is_file():
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / file for name, file in names.items()}
        if not whole.is_file():
            others = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            raise ModelError(
                f"{self.folder}: found {others or 'no weights'}, allowed are *.safetensors. "
                "Convert the weights with save_pretrained, or choose a revision that has safetensors."
            )
        with self._reading(whole) as file:
            return dict.fromkeys(file.keys(), whole)

    def _plan(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[_Source], set[str]]:
        """The sources, and the names of tensors that the model does not have."""
        renamings = [entry for entry in self._transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix, known = self._model.base_model_prefix, dict.fromkeys(shapes, True)
        sources: dict[str, _Source] = {}
        unexpected: set[str] = set()
        for stored in sorted(self._files, key=dot_natural_key):  # converters stack tensors in this order
            name, pattern = rename_source_key(stored, renamings, converters, prefix, known)
            if name not in known and stored in known:
                name, pattern = stored, None
            if name not in known:
                unexpected.add(name)
                continue
            source = sources.setdefault(name, _Source(name, None if pattern is None else by_pattern[pattern]))
            source.stored.append((stored, pattern or ""))
        return list(sources.values()), unexpected

    def _require_exactly(
        self, shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], unexpected: set[str]
    ) -> None:
        report = SimpleNamespace(
            missing_keys=shapes.keys() - found.keys() - self._twins.keys(), unexpected_keys=unexpected
        )
        self._model._adjust_missing_and_unexpected_keys(report)  # ignores what the model's class allows
        mismatched = [name for name, shape in found.items() if shapes.get(name) != shape]
        wrong = {"missing_keys": report.missing_keys, "unexpected_keys": report.unexpected_keys}
        wrong["mismatched_keys"] = {f"{name} {found[name]} instead of {shapes.get(name)}" for name in mismatched}
        if any(wrong.values()):
            listed = "; ".join(f"{kind}: {sorted(names)[:5]} ({len(names)})" for kind, names in wrong.items() if names)
            raise ModelError(
                f"{self.folder}: the tensors do not fit {type(self._model).__name__}: {listed}. "
                "They must be exactly those of config.json. Use the config.json that was saved with the weights."
            )

    def read(self, name: str, rows: slice = _ALL) -> Tensor:
        """These rows of a tensor, on the CPU. May share memory with a mapped file: copy it before you change it.

        Raises:
            ModelError: the file is damaged.
        """
        name = self._twins.get(name, name)
        source = self._sources[name]
        if source.converter is None:
            return self._stored(source.stored[0][0], rows)
        return self._convert(source.first)[name][rows]

    def _converted(self, first: str) -> dict[str, Tensor]:
        return self._yielded(self._sources[first], self._stored)

    def _yielded(self, source: _Source, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors of the model that come from a source."""
        if source.converter is None:
            return {source.first: read(source.stored[0][0])}
        converter: Any = copy.deepcopy(source.converter)
        for stored, pattern in source.stored:
            converter.add_tensor(source.first, stored, pattern, read(stored))
        values = converter.convert(source.first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    def _stored(self, name: str, rows: slice = _ALL) -> Tensor:
        with self._reading(self._files[name]) as file:
            view = file.get_slice(name)
            values: Tensor = view[rows] if view.get_shape() else file.get_tensor(name)
            return values

    def _empty(self, name: str) -> Tensor:
        with self._reading(self._files[name]) as file:
            return torch.empty(file.get_slice(name).get_shape(), device="meta")

    @contextmanager
    def _reading(self, path: Path) -> Iterator[Any]:
        try:
            yield self._open(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{path}: the weights cannot be read: {error}. Download or merge the model again."
            ) from error

    def buckets(self, bucket_bytes: int, dtype: torch.dtype) -> Iterator[list[str]]:
        """The names of the model's tensors, a tied one once. Tensors that are stored together are in one bucket.

        Args:
            bucket_bytes: a bucket is closed as soon as it has this size in ``dtype``.
        """
        shapes, aliases = self._model.state_dict(), tied_aliases(self._model)
        by_source: dict[int, list[str]] = {}
        for name in shapes:
            if name not in aliases:
                by_source.setdefault(id(self._sources[self._twins.get(name, name)]), []).append(name)
        bucket: list[str] = []
        size = 0
        for names in by_source.values():
            bucket += names
            size += sum(shapes[name].numel() for name in names) * dtype.itemsize
            if size >= bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a bucket under the names of this folder's files, in the layout of published files."""
        self._model._weight_conversions = [entry for entry in self._transforms if entry.was_used()]
        return published(self._model, revert_weight_conversion(self._model, dict(tensors)))


def write_shards(buckets: Iterable[Mapping[str, Tensor]], like: StoredWeights, out: Path) -> None:
    """Write tensors of a model as safetensors, one file for each bucket, and their index.

    Args:
        buckets: as ``StoredWeights.buckets`` divides the names. Only one is in memory at a time.
        like: its folder's names and layout are used.
    """
    files: dict[str, list[str]] = {}
    total = 0
    for number, bucket in enumerate(buckets):
        stored = like.as_stored(bucket)
        file = f"model-{number:05d}.safetensors"
        save_file(stored, out / file, metadata={"format": "pt"})
        files[file] = list(stored)
        total += sum(value.nbytes for value in stored.values())
    if len(files) == 1:
        (out / file).rename(out / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": {name: f for f, names in files.items() for name in names}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def with_adapters(weights: Values, adapters: Mapping[str, Tensor]) -> Values:
    """``weights``, and for the names of ``adapters`` their values."""
    return lambda name, rows: adapters[name][rows] if name in adapters else weights(name, rows)


@torch.no_grad()
def load_shards(root: nn.Module, hf: nn.Module, values: Values, device: torch.device) -> None:
    """Give every parameter of ``hf`` that is on the meta device its memory on ``device``, and this rank's rows of its
    values. Buffers move to ``device``.

    Args:
        root: the module that contains ``hf``. FSDP2 has sharded it already.
        values: by the names of ``hf``'s state dict. They are converted to the parameters' dtypes.
    """
    loaded: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    persistent = hf.state_dict().keys()
    for prefix, module in hf.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if (full := f"{prefix}.{name}" if prefix else name) in persistent:
                module._buffers[name] = values(full, _ALL).to(buffer.dtype)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in loaded:
                rows = values(f"{prefix}.{name}" if prefix else name, own_rows(parameter))
                loaded[id(parameter)] = _with_values(parameter, rows.to(device))
            setattr(module, name, loaded[id(parameter)])
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    # FSDP2 takes the new memory of its parameters
    root._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def _with_values(parameter: nn.Parameter, source: Tensor) -> nn.Parameter:
    local = torch.empty(source.shape, dtype=parameter.dtype, device=source.device).copy_(source)
    whole = DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local  # type: ignore[no-untyped-call]
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
