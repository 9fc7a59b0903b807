"""Builds an ExperimentConfig from plain values and ``key=value`` overrides, with errors that say what to change."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from rlcore.config.base import flatten
from rlcore.config.describe import describe_entry, describe_type, models_in, tag_of
from rlcore.config.experiment import ExperimentConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SECRET = r"://[^/\s:@]+:[^@\s/]+@|\bhf_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}\b"
"""A password in an address, a Hugging Face token, or an AWS key. Settings are stored and shown, so none may be
secret."""

RENAMED = {
    "training.problems_per_step": "training.problems_per_batch",
    "training.updates_per_batch": "training.mini_batches",
    "training.passes_per_batch": "training.ppo_epochs",
    "rollout.tokens_per_burst": "rollout.scheduler_steps_per_call",
    "rollout.partial.one_ahead": "rollout.partial.prefetch",
    "algorithm.dynamic_sampling.max_staleness": "algorithm.dynamic_sampling.surplus_staleness",
}
"""Setting of an older version -> its name today, in the same group."""
_OTHER_UNIT = {
    "algorithm.dynamic_sampling.max_staleness": " It counts policy versions (rollout batches) instead of optimizer "
    "steps: divide the old value by training.mini_batches * training.ppo_epochs."
}


def refuse_secret(key: str, text: str) -> None:
    """
    Raises:
        ConfigError: ``text`` holds a secret. The message names the key, never the text.
    """
    if re.search(SECRET, text):
        raise ConfigError(
            f"{key} holds a password or a token, and settings are stored and shown. Leave it out: keys come from the "
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN, MLFLOW_TRACKING_PASSWORD)."
        )


def read_experiment(path: Path) -> ExperimentConfig:
    """The experiment that this or an older version stored."""
    return ExperimentConfig.model_validate(with_new_names(json.loads(path.read_text())))


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """An experiment's values, where settings of older versions have the names of today."""
    tree = json.loads(json.dumps(tree))
    for old, new in RENAMED.items():
        *groups, leaf = old.split(".")
        group: Any = tree
        for name in groups:
            group = (group or {}).get(name)
        if group and leaf in group:
            group[new.rpartition(".")[2]] = group.pop(leaf)
            if old in _OTHER_UNIT:
                group["surplus_staleness"] //= tree["training"]["mini_batches"] * tree["training"]["ppo_epochs"]
    return tree


def build_experiment(values: dict[str, Any], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge dotted ``key=value`` overrides (values in JSON, else text) into ``values`` and validate the whole.

    An override of a choice's ``name`` drops the settings of the previous choice.

    Raises:
        ConfigError: an override without ``=``, a secret, an unknown key, or a value that breaks a rule. The message
            lists all errors.
    """
    tree = json.loads(json.dumps(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        refuse_secret(key.strip() if equals else "an override", override)
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not key=value. Write for example training.steps=40.")
        *parents, leaf = key.strip().split(".")
        value = _parse_value(text.strip())
        node = tree
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"override {override!r}: {parent} holds a value, not a group of settings.")
        if leaf == "name" and parents and node.get("name", value) != value:
            node.clear()
        node[leaf] = value
    for key, setting in flatten(tree):
        refuse_secret(key, str(setting))
    try:
        return ExperimentConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, ExperimentConfig)) from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _explain(error: ValidationError, root: type[BaseModel]) -> str:
    findings: list[str] = []
    for item in error.errors(include_url=False):
        models, allowed, where = _along(root, item["loc"])
        if item["type"] == "extra_forbidden":
            renamed = f"It is now {RENAMED[where]}.{_OTHER_UNIT.get(where, '')}" if where in RENAMED else ""
            advice = renamed or _known_keys(models, str(item["loc"][-1]))
            findings.append(f"{where}: unknown key. {advice}")
        elif item["type"] == "value_error":  # our own messages, which name their keys
            findings += item["msg"].removeprefix("Value error, ").split("\n- ")
        else:
            findings.append(_wrong_value(item, models, allowed, where))
    findings = list(dict.fromkeys(findings))  # pydantic reports a value of several types once for each type
    return "\n- ".join([f"the experiment has {len(findings)} error(s):", *findings])


def _wrong_value(item: ErrorDetails, models: list[type[BaseModel]], allowed: str, where: str) -> str:
    kind, given = item["type"], item["input"]
    names = ", ".join(name for model in models if (name := tag_of(model)))
    if kind == "union_tag_invalid":
        return f"{where}.name: found {given['name']!r}. Allowed: {names}."
    keys = f"Its keys: {', '.join(_keys(models))}."
    if kind in ("model_type", "model_attributes_type"):
        return f"{where}: found {given!r}, where a group of settings belongs. {keys}"
    if kind == "missing":
        return f"{where} is missing. {keys if models else f'Allowed: {allowed}.'}"
    return f"{where}: found {given!r}. Allowed: {allowed}."


def _along(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[type[BaseModel]], str, str]:
    """The models that may have the last part of ``loc`` as a key, what the value there may be, and ``loc`` as a dotted
    key. pydantic inserts the name of a tagged union's choice between the keys, and puts the name of a type at the end
    if a value may have several types."""
    models, allowed, keys, entry = [root], "", [], ""
    for part in loc:
        chosen = [model for model in models if tag_of(model) == part] if len(models) > 1 else []
        fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
        if entry:  # part is a name or an index
            keys.append(str(part))
            allowed, entry = entry, ""
        elif chosen:
            models = chosen
        elif fields:
            keys.append(str(part))
            models = [model for field in fields for model in models_in(field.annotation)]
            allowed, entry = describe_type(fields[0]), describe_entry(fields[0])
        elif models:  # an unknown key
            keys.append(str(part))
    return models, allowed, ".".join(keys)


def _keys(models: list[type[BaseModel]]) -> list[str]:
    return sorted({name for model in models for name in model.model_fields})


def _known_keys(models: list[type[BaseModel]], key: str) -> str:
    known = _keys(models)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed here: {', '.join(known)}."
