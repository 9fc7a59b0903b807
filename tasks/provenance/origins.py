"""What a run was started from, written down at each start: code, environment, data, model, reward and template.

``origins.jsonl`` of the run's folder has a line for each start whose origins differ from those before; what is longer
than a line (patches, lists of packages, files of the user's) lies beside it in ``origins/``, under its content's hash.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra import provenance
from infra.logs import redact
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config.reward import UserReward
from rlcore.data.prompts import template_text
from rlcore.files import write_json_atomically
from tasks.run import Run, append_line


class Origin(BaseModel):
    """Where one or more starts of a run came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str  # of the first such start
    commit: str  # empty: not a git checkout
    patch: str | None  # file of ``origins/`` with what the working tree had beyond the commit; None: nothing
    code_digest: str  # of rlflow's own files as they were
    environment: str  # file of ``origins/``
    python: str
    hardware: str
    versions: dict[str, str]
    reward: str | None  # file of ``origins/`` with the user's own reward
    template: str  # file of ``origins/`` with the prompt template's text
    train: DatasetRef
    validation: DatasetRef
    base: ModelRef

    @property
    def files(self) -> list[str]:
        return [name for name in (self.patch, self.environment, self.reward, self.template) if name is not None]


def record_origin(
    run: Run, facts: provenance.Provenance, train: DatasetRef, validation: DatasetRef, base: ModelRef
) -> Origin:
    """Note where this start comes from, unless a start before came from the same."""
    folder = origins_dir(run.run_dir)
    reward = run.experiment.reward
    origin = Origin(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=facts.commit,
        patch=_kept(folder, "uncommitted.patch", facts.patch) if facts.patch else None,
        code_digest=facts.code,
        environment=_kept(folder, "environment.txt", facts.environment),
        python=facts.python,
        hardware=facts.hardware,
        versions=facts.versions,
        reward=_kept(folder, "reward.py", redact(reward.file.read_text())) if isinstance(reward, UserReward) else None,
        template=_kept(folder, "template.jinja", template_text(run.experiment.data.template)),
        train=train,
        validation=validation,
        base=base,
    )
    known = [item.model_copy(update={"at": origin.at}) for item in read_origins(run.run_dir)]
    if origin not in known:
        append_line(run.run_dir / "origins.jsonl", origin.model_dump_json())
    return origin


def read_origins(run_dir: Path) -> list[Origin]:
    path = run_dir / "origins.jsonl"
    return [Origin.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def origins_dir(run_dir: Path) -> Path:
    return run_dir / "origins"


def _kept(folder: Path, name: str, text: str) -> str:
    """The name that ``text`` lies under in ``folder``."""
    kept = f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{name}"
    if not (folder / kept).exists():
        write_json_atomically(folder / kept, text)
    return kept
