"""The weights of a checkpoint under Hugging Face's names, read a few at a time. Needs no process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlcore.errors import CheckpointError
from rlcore.models.checkpoint import ALPHA, read_tensors, some, stored_tensors
from rlcore.models.loading import empty_hf_model
from rlcore.models.lora import A, B, is_adapter, merge_adapter
from rlcore.models.sharding import tied_aliases
from rlcore.models.stored_weights import StoredWeights


class CheckpointWeights:
    """The whole tensors of a checkpoint. Adapters are merged into the weights of the base model in float32."""

    def __init__(self, folder: Path, base: Path, *, trust_remote_code: bool = False) -> None:
        """
        Args:
            base: the model folder that the run started from. If the checkpoint holds all weights, only the
                architecture is used.

        Raises:
            CheckpointError: the checkpoint's tensors are not those of this architecture.
            ModelError: the folder cannot be read.
        """
        self.model = empty_hf_model(base, trust_remote_code)
        self.base = StoredWeights(base, self.model)
        self._folder = folder
        stored = stored_tensors(folder)
        self._stored = {key.removeprefix("model."): e for key, e in stored.items() if key.startswith("model.")}
        self._alpha: float | None = None
        if ALPHA in stored:
            alpha = torch.empty((), dtype=torch.float64)
            read_tensors(folder, {"lora": {"alpha": alpha}})
            self._alpha = float(alpha)
        self._require_same_architecture()

    def buckets(self, bucket_bytes: int = 1 << 30) -> Iterator[dict[str, Tensor]]:
        """All tensors, a tied one once, on the CPU. Merged adapters give float32, other tensors keep their dtype.

        Args:
            bucket_bytes: a bucket is closed as soon as it has this size in float32.
        """
        for names in self.base.buckets(bucket_bytes, torch.float32):
            yield self._merged(names) if self._alpha is not None else self._read(names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same under every name of a state dict: an engine takes a tied tensor once for each of its names."""
        aliases: dict[str, list[str]] = {}
        for alias, name in tied_aliases(self.model).items():
            aliases.setdefault(name, []).append(alias)
        for bucket in self.buckets():
            for name, value in bucket.items():
                for each in (name, *aliases.get(name, ())):
                    yield each, value

    def adapters(self) -> tuple[dict[str, Tensor], float]:
        """The adapters by name, on the CPU, and their alpha.

        Raises:
            CheckpointError: the checkpoint has none.
        """
        if self._alpha is None:
            raise CheckpointError(f"{self._folder} has no adapters, but all weights. Merge it: rlflow merge RUN.")
        return self._read([name for name in self._stored if is_adapter(name)]), self._alpha

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        entries = {name: self._stored[name] for name in names}
        values = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
        read_tensors(self._folder, {"model": values})
        return values

    def _merged(self, names: Sequence[str]) -> dict[str, Tensor]:
        modules = {name: name.removesuffix(".weight") for name in names}
        adapters = self._read([module + part for module in modules.values() for part in (A, B) if self._adapts(module)])
        merged = {}
        for name, module in modules.items():
            weight = self.base.read(name).float()
            if self._adapts(module) and self._alpha is not None:
                weight = merge_adapter(weight, adapters[module + A], adapters[module + B], self._alpha)
            merged[name] = weight
        return merged

    def _adapts(self, module: str) -> bool:
        return module + A in self._stored

    def _require_same_architecture(self) -> None:
        aliases = tied_aliases(self.model)
        expected = {name: tuple(v.shape) for name, v in self.model.state_dict().items() if name not in aliases}
        found = {name: tuple(entry.size) for name, entry in self._stored.items()}
        if self._alpha is not None:  # the shapes of the weights that the adapters belong to
            modules = {name.removesuffix(part) for name in found for part in (A, B) if name.endswith(part)}
            halves = {m: (found.get(m + A, ()), found.get(m + B, ())) for m in modules}
            found = {f"{m}.weight": (*b[:1], *a[1:]) for m, (a, b) in halves.items()}
            expected = {name: expected[name] for name in found.keys() & expected.keys()}
        shapes = {n for n in found.keys() & expected.keys() if found[n] != expected[n]}
        if found.keys() != expected.keys() or shapes:
            different = [f"{name} {found[name]} instead of {expected[name]}" for name in shapes]
            raise CheckpointError(
                f"{self._folder} does not fit the architecture of {self.base.folder}: missing "
                f"{some(expected.keys() - found.keys())}; unexpected {some(found.keys() - expected.keys())}; other "
                f"shapes {some(different)}. Give the model folder that the run started from."
            )
