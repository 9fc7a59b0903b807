"""``python -m rlcore.migrate from-easyr1 [CONFIG.yaml] [KEY=VALUE ...]`` and ``from-verl``: another trainer's
configuration as an experiment for prefect.yaml, with an account of every key. What it prints is YAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.errors import ConfigError
from rlcore.migrate.easyr1 import from_easyr1
from rlcore.migrate.foreign import Note, Translation, read_foreign
from rlcore.migrate.verl import from_verl

Translate = Callable[[Mapping[str, Any], int | None], Translation]
COMMANDS: Mapping[str, tuple[Translate, str]] = {
    "from-easyr1": (from_easyr1, "EasyR1's YAML, dotted arguments over it"),
    "from-verl": (from_verl, "verl's GRPO YAML, or the Hydra arguments of its scripts"),
}


def printed(translation: Translation) -> str:
    """The experiment as prefect.yaml has it under ``definitions.experiments``, its deployment, and, as comments, what
    has no equivalent and what rlflow does anyway."""
    name = translation.experiment.name
    deployment = {
        "name": name, "entrypoint": "flows/train_grpo.py:grpo_geo3k", "tags": ["grpo"],
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rlcore.migrate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        command.add_argument("words", nargs="+", metavar="CONFIG.yaml or KEY=VALUE")
        command.add_argument("--rows", type=int, help="training problems; an epoch is rows // batch rollout batches")
    options = parser.parse_args(words)
    files = [word for word in options.words if "=" not in word]
    if len(files) > 1:
        parser.error(f"found {len(files)} files, {', '.join(files)}; one is allowed, and key=value over it")
    translate, _ = COMMANDS[options.command]
    try:
        given = read_foreign(Path(files[0]) if files else None, [word for word in options.words if "=" in word])
        sys.stdout.write(printed(translate(given, options.rows)))
    except ConfigError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
