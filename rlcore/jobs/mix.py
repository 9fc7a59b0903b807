"""``python -m rlcore.jobs.mix spec.json``: the resized datasets of a mixture's sources as one dataset.

Weights are no part of it: they decide only how often training takes a problem from each source.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from rlcore.artifacts import DatasetRef, SourceRows
from rlcore.data.prepare.folder import REJECTS, existing_dataset, finish_folder, load_report, mixed_folder
from rlcore.data.rejects import Reject, read_rejects
from rlcore.data.table import IMAGES, PreparedRow, load_rows
from rlcore.files import building
from rlcore.jobs import job_main
from rlcore.specs import MixSpec


def mix(spec: MixSpec) -> DatasetRef:
    """Join the datasets, or return the folder that is there already.

    Problems come from each source in turn, as long as it has some, so that the first N are of all sources. A problem's
    id begins with the name of its source. Images are hard links where the file system has them.

    Raises:
        StorageError: a dataset is damaged, no space, or an existing folder with parts missing.
    """
    final = mixed_folder(spec)
    if found := existing_dataset(final):
        return found
    parts = sorted(spec.parts.items())
    reports = {name: load_report(Path(part.path)) for name, part in parts}
    rows = [[_named(row, name) for row in load_rows(Path(part.path))] for name, part in parts]
    rejects = [_reject(item, name) for name, part in parts for item in read_rejects(Path(part.path) / REJECTS)]
    with building(final) as aside:
        (aside / IMAGES).mkdir()
        for _, part in parts:
            for image in sorted((Path(part.path) / IMAGES).iterdir()):
                if not (aside / IMAGES / image.name).exists():  # the same picture in two sources has one size
                    _link_or_copy(image, aside / IMAGES / image.name)
        return finish_folder(
            aside,
            final,
            source=", ".join(f"{name}: {part.source}" for name, part in parts),
            columns=list(dict.fromkeys(column for report in reports.values() for column in report.columns)),
            data=spec.data,
            rows=[row for row in chain.from_iterable(zip_longest(*rows)) if row is not None],
            rejects=rejects,
            sources=tuple(
                SourceRows(
                    name=name,
                    source=part.source,
                    digest=part.digest,
                    num_problems=part.num_problems,
                    num_rejected=part.num_rejected,
                )
                for name, part in parts
            ),
        )


def _named(row: PreparedRow, name: str) -> PreparedRow:
    problem = replace(row.problem, problem_id=f"{name}/{row.problem.problem_id}", source_name=name)
    return replace(row, problem=problem)


def _reject(item: Reject, name: str) -> Reject:
    return replace(item, problem_id=f"{name}/{item.problem_id}")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


if __name__ == "__main__":
    job_main(mix, MixSpec)
