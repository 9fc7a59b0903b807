"""Another trainer's configuration as an experiment for prefect.yaml, with an account of every key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.errors import ConfigError
from rlcore.migrate.easyr1 import from_easyr1
from rlcore.migrate.foreign import Note, Translation, read_foreign
from rlcore.migrate.verl import from_verl

TRANSLATE: Mapping[str, Callable[[Mapping[str, Any], int | None], Translation]] = {
    "easyr1": from_easyr1,  # its YAML, with dotted arguments over it
    "verl": from_verl,  # its GRPO YAML, or the Hydra arguments of its scripts
}


def translate(trainer: str, words: Sequence[str], rows: int | None) -> str:
    """YAML for prefect.yaml: an experiment and its deployment, and as comments the keys without an equivalent.

    Args:
        words: at most one file, and ``key=value`` arguments over it.
        rows: number of training problems; an epoch is rows // batch rollout batches.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"found {len(files)} files, {', '.join(files)}; give one file and key=value arguments")
    given = read_foreign(Path(files[0]) if files else None, [word for word in words if "=" in word])
    translation = TRANSLATE[trainer](given, rows)
    name = translation.experiment.name
    deployment = {
        "name": name, "entrypoint": "flows/train_grpo.py:train_grpo", "tags": ["grpo"],
        "work_pool": {"name": "gpu"}, "parameters": {"experiment": name},
    }  # fmt: skip
    parts = [
        f"# {len(translation.notes)} keys: {len(translation.having('translated'))} translated, "
        f"{len(translation.having('same'))} done so anyway, {len(translation.having('listed'))} without equivalent.",
        "# For prefect.yaml, under definitions.experiments and deployments (there with work_pool: *gpu):",
        yaml.safe_dump({name: translation.values}, sort_keys=False, default_flow_style=None, width=120).rstrip(),
        "deployments:",
        yaml.safe_dump([deployment], sort_keys=False, default_flow_style=None, width=120).rstrip(),
        *_comments("Without equivalent:", translation.having("listed")),
        *_comments("Done so anyway:", translation.having("same")),
    ]
    return "\n".join(parts) + "\n"


def _comments(title: str, notes: Sequence[Note]) -> Iterator[str]:
    yield f"# {title}{'' if notes else ' nothing'}"
    yield from (f"#   {note}" for note in notes)
