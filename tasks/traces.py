"""A sample of each segment's rollouts as traces of MLflow: RLFLOW_TRACES of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import ServerError
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.traces import Rollout
from rlcore.data.pixels import IMAGE_MARKER
from rlcore.segment.spec import SegmentManifest
from tasks.pictures import small_picture
from tasks.run import Run, tracker_of

MOST_PIXELS = 384  # of a side: MLflow stores the picture with each trace


def log_rollouts(run: Run, settings: Settings) -> None:
    """Give MLflow what it lacks of all committed segments. An outage is left to the next segment."""
    if not settings.traces:
        return
    rollouts = [item for manifest in _segments(run) for item in rollouts_of(run, manifest.last_step, settings.traces)]
    try:
        tracker_of(run, settings).log_rollouts(rollouts)
    except ServerError as error:
        get_logger().warning("MLflow did not accept the rollouts of run %s: %s", run.run_id, error)


def _segments(run: Run) -> Iterator[SegmentManifest]:
    segment = 0
    while (manifest := run.manifest(segment)) is not None:
        yield manifest
        segment += 1


def rollouts_of(run: Run, step: int, number: int) -> list[Rollout]:
    """The first rollouts of the batch that ended with ``step``; none if the trainer saved none. Pictures that are gone
    are left out."""
    path = run.run_dir / "samples" / f"step-{step:06d}.json"
    if not path.exists():
        return []
    at_ms = next((record.timestamp_ms for record in run.journal() if record.step == step), 0)
    rows = json.loads(path.read_bytes())[:number]
    return [_rollout(row, step, place, at_ms, _image_folder(run)) for place, row in enumerate(rows)]


def _rollout(row: Mapping[str, Any], step: int, place: int, at_ms: int, images: Path) -> Rollout:
    pictures = []
    for name in row["images"]:
        with suppress(OSError):  # cleaned away, or another machine's
            pictures.append(small_picture(images / f"{name}.png", MOST_PIXELS))
    facts = {
        "step": step, "problem": row["problem_id"], "answer": row["answer"], "reward": row["reward"],
        "tokens": row["tokens"], "finish_reason": row["finish_reason"], "graded": row["graded"], **row["parts"],
    }  # fmt: skip
    return Rollout(
        key=f"step-{step}/{place}",
        name=f"step {step}, {row['problem_id']}",
        question=row["question"].replace(IMAGE_MARKER, "") if pictures else row["question"],
        images=tuple(pictures),
        completion=row["completion"],
        at_ms=at_ms,
        facts=facts,
    )


def _image_folder(run: Run) -> Path:
    spec = run.run_dir / "spec.json"
    return Path(json.loads(spec.read_bytes())["dataset"]["path"]) / "images" if spec.exists() else run.run_dir
