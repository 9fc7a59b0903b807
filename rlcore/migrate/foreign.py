"""Translation of other trainers' configurations to rlflow's: a ledger that accounts for every given key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.config.experiment import ExperimentConfig
from rlcore.errors import ConfigError

Verdict = Literal["translated", "same", "listed"]
PASS_THROUGH = "tiny"  # the prompt template that passes the prompt through unchanged
KNOWN_ROWS: Mapping[str, int] = {"hiyouga/geometry3k@train": 2101, "hiyouga/math12k@train": 12_000}
"""Number of training problems in published datasets. For others the user gives --rows."""


@dataclass(frozen=True, slots=True)
class Note:
    """The outcome for one key."""

    key: str
    value: object
    verdict: Verdict  # same: rlflow does the same; listed: rlflow has no equivalent
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.value)}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Translation:
    """An experiment, and a note on every key it was made from."""

    experiment: ExperimentConfig
    values: dict[str, Any]  # of the experiment, as in prefect.yaml: without its name and what is the default
    notes: tuple[Note, ...]

    def having(self, verdict: Verdict) -> list[Note]:
        return [note for note in self.notes if note.verdict == verdict]


@dataclass(slots=True)
class Ledger:
    """The keys of a foreign configuration and that trainer's defaults. Each given key gets one note."""

    given: Mapping[str, Any]  # dotted
    defaults: Mapping[str, Any]
    out: dict[str, Any] = field(default_factory=dict)  # dotted keys of ours
    notes: list[Note] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """The given value of ``key`` or that trainer's default. Makes no note."""
        return self.given.get(key, self.defaults.get(key))

    def put(self, ours: str, value: Any, *keys: str, text: str = "") -> None:
        """Set rlflow's key ``ours``, which replaces ``keys``."""
        self.out[ours] = value
        self._note(keys, "translated", f"{ours}: {json.dumps(value)}{f', {text}' if text else ''}")

    def same(self, *keys: str, text: str = "") -> None:
        self._note(keys, "same", text)

    def listed(self, *keys: str, text: str) -> None:
        self._note(keys, "listed", text)

    def same_if(self, key: str, *values: Any, otherwise: str, text: str = "") -> None:
        """Note that rlflow does the same for these values of ``key``. Any other value is listed with ``otherwise``."""
        if self.get(key) in values:
            self.same(key, text=text)
        else:
            self.listed(key, text=otherwise)

    def close(self, unused: Mapping[str, str], unknown: str) -> None:
        """List all keys without a note: with the reason of their prefix in ``unused``, else as unknown."""
        for key in sorted(self.given.keys() - self._seen):
            reason = next((text for prefix, text in unused.items() if key.startswith(prefix)), unknown)
            self.listed(key, text=reason)

    def _note(self, keys: Iterable[str], verdict: Verdict, text: str) -> None:
        for key in keys:
            if key in self._seen:
                continue  # only the first note of a key counts
            self._seen.add(key)
            if key in self.given:
                self.notes.append(Note(key, self.given[key], verdict, text))

    def translation(self, name: str) -> Translation:
        """
        Raises:
            ConfigError: the translated values make no valid experiment.
        """
        from rlcore.config.build import build_experiment

        words = [f"{key}={json.dumps(value)}" for key, value in self.out.items()]
        experiment = build_experiment({"name": name}, words)
        return Translation(experiment, _without_defaults(self.out, experiment), tuple(self.notes))


def read_foreign(path: Path | None, arguments: Iterable[str]) -> dict[str, Any]:
    """Dotted keys of a YAML file, with dotted ``key=value`` arguments (Hydra's ``+key=value`` too) over it.

    Raises:
        ConfigError: no such file, no mapping in it, or an argument without ``=``.
    """
    import yaml

    found: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds {type(tree).__name__}; a mapping of settings is needed.")
        found = dict(_flat(tree))
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"argument {argument!r} is not key=value.")
        value = yaml.safe_load(text)
        name = key.strip().lstrip("+~")
        for old in [old for old in found if old.startswith(f"{name}.")]:
            del found[old]
        found |= dict(_flat(value, name)) if isinstance(value, dict) and value else {name: value}
    # YAML 1.1 reads 1e-6 as a text
    return {key: _number(value) for key, value in found.items()}


def slug(text: object) -> str:
    """A valid name of an experiment."""
    cleaned = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in str(text).lower())
    return "-".join(filter(None, cleaned.split("-")))[:60] or "translated"


def steps_of(ledger: Ledger, train: str, batch: int, per_batch: int, rows: int | None, epochs: str, limit: str) -> None:
    """training.steps from epochs over the rows, or from a number of rollout batches."""
    rows = KNOWN_ROWS.get(train) if rows is None else rows
    if ledger.get(limit):
        ledger.put("training.steps", int(ledger.get(limit)) * per_batch, limit, text="rollout batches times updates")
        ledger.same(epochs, text=f"{limit} decides")
    elif rows is None:
        ledger.listed(epochs, text="give --rows, the number of training problems: an epoch is rows // batch batches")
    else:
        batches = max(1, rows // batch) * int(ledger.get(epochs))
        ledger.put("training.steps", batches * per_batch, epochs, text=f"{rows} rows")
        ledger.same(limit)


def engine_of(ledger: Ledger, key: str) -> None:
    """rollout.tensor_parallel from ``key`` if given, else one engine per worker: it samples the same without
    communication."""
    if ledger.out.get("model.lora.rank"):
        ledger.same_if(key, 1, otherwise="with adapters each worker's engine holds the whole model")
    elif key in ledger.given:
        ledger.put("rollout.tensor_parallel", int(ledger.given[key]), key)


def engine_dtype_of(ledger: Ledger, key: str) -> None:
    """rollout.dtype from ``key``, unless it is the default of engines on GPUs."""
    finer = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    value = str(ledger.get(key) or "bfloat16")
    if (dtype := finer.get(value, value)) in finer.values():
        ledger.put("rollout.dtype", dtype, key)
    else:
        ledger.same_if(
            key, None, "bf16", "bfloat16", "auto", otherwise="rollout.dtype knows float32, bfloat16, float16"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _without_defaults(out: Mapping[str, Any], experiment: ExperimentConfig) -> dict[str, Any]:
    """``out`` as a tree, without what is the default."""
    defaults = ExperimentConfig(name=experiment.name).flat()
    tree: dict[str, Any] = {}
    for key, value in out.items():
        if key in defaults and defaults[key] == value:
            continue
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
