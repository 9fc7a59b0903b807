"""Benchmark suites: one file each under ``benchmarks/``, with where the problems come from, how they are asked and how
answers are graded. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlcore.config import DataConfig, EvaluationConfig, ExperimentConfig, Frozen, RewardConfig, build_experiment
from rlcore.errors import ConfigError

_FILES = Path(__file__).parent / "benchmarks"
_ANY_LENGTH = 1 << 30  # nothing is trained, so the rule that a microbatch holds the longest sequence must not apply
_OF_THE_MODEL = ("system_prompt", "chat_template_arguments")


class Suite(Frozen):
    """One file under ``benchmarks/``."""

    name: str  # of the file
    title: str
    groups: tuple[str, ...]
    """Names under which it is evaluated together with others."""
    problems: int
    """Size of the published set."""
    licence: str
    paper: str
    hub: str | None = None
    """Hugging Face id, or id:subset. null: the set is not on the hub as one dataset."""
    split: str
    rows: tuple[int, int] | None = None
    """The rows of the split that belong to the set: the first one, and the one after the last. null: all."""
    note: str = ""
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig

    def source(self, folder: str | None) -> str:
        """What ``data.validation`` is set to.

        Args:
            folder: of local copies, one per suite: a folder of the suite's name, or a file NAME.parquet, NAME.jsonl or
                NAME.json. All rows of a local copy count, except those of other splits. None: the hub.

        Raises:
            ConfigError: the folder has no such copy, or the set is not on the hub.
        """
        if folder is not None:
            names = (self.name, f"{self.name}.parquet", f"{self.name}.jsonl", f"{self.name}.json")
            root = Path(folder).expanduser().absolute()
            copy = next((root / name for name in names if (root / name).exists()), None)
            if copy is None:
                raise ConfigError(
                    f"{folder} has no copy of the suite {self.name}: looked for {', '.join(names)}. Put it there under "
                    "one of these names, or leave out --data to use the hub."
                )
            return f"{copy}@{self.split}" if copy.is_dir() else str(copy)
        if self.hub is None:
            raise ConfigError(
                f"the suite {self.name} is not on the hub as one dataset. {self.note} Make a folder {self.name} of "
                "them, and give the folder that holds it with --data."
            )
        rows = "" if self.rows is None else f"[{self.rows[0]}:{self.rows[1]}]"
        return f"{self.hub}@{self.split}{rows}"

    def experiment(
        self,
        base: ExperimentConfig,
        *,
        folder: str | None = None,
        problems: int | None = None,
        overrides: Sequence[str] = (),
    ) -> ExperimentConfig:
        """``base`` with this suite's data, reward and evaluation settings.

        What belongs to a model stays that of ``base``: system prompt, arguments of the chat template, how thoughts are
        graded, and the grading processes.

        Args:
            folder: as ``source``.
            problems: evaluate only the first so many.
            overrides: ``key=value``, last.

        Raises:
            ConfigError: as ``source``, or values that break a rule.
        """
        values = base.model_dump(mode="json")
        data = {name: values["data"][name] for name in _OF_THE_MODEL}
        data |= self.data.model_dump(mode="json", exclude_unset=True) | {"validation": self.source(folder)}
        shared = {name: values["reward"][name] for name in ("thoughts", "processes", "deadline_seconds")}
        evaluation = self.evaluation.model_dump(mode="json")
        if problems is not None:
            evaluation["problems"] = problems
        reward = self.reward.model_dump(mode="json", exclude_unset=True) | {"name": self.reward.name}
        values |= {"data": data, "reward": shared | reward, "evaluation": evaluation}
        values["training"]["tokens_per_microbatch"] = _ANY_LENGTH
        return build_experiment(values, overrides)


def suites_called(names: Sequence[str]) -> list[Suite]:
    """The suites and groups called ``names``, each suite once.

    Raises:
        ConfigError: a name that is neither; lists all.
    """
    every = all_suites()
    chosen: dict[str, Suite] = {}
    for name in names:
        members = [suite for suite in every.values() if name == suite.name or name in suite.groups]
        if not members:
            groups = sorted({group for suite in every.values() for group in suite.groups})
            raise ConfigError(f"no suite {name!r}. Suites: {', '.join(every)}. Groups of them: {', '.join(groups)}.")
        chosen |= {suite.name: suite for suite in members}
    return list(chosen.values())


@cache
def all_suites() -> Mapping[str, Suite]:
    """Every suite by its name."""
    return {path.stem: read_suite(path) for path in sorted(_FILES.glob("*.toml"))}


def read_suite(path: Path) -> Suite:
    """
    Raises:
        ConfigError: the file does not parse, or misses a field.
    """
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return Suite.model_validate({"name": path.stem, **values})
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{path} describes no suite: {error}") from error
