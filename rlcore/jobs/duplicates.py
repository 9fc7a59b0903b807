"""Problems that training and evaluation share: ``python -m rlcore.jobs.duplicates SPEC.json``."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from rlcore.artifacts import DuplicatesRef
from rlcore.data.contamination import as_lines, compare_datasets
from rlcore.files import building
from rlcore.jobs import job_main
from rlcore.specs import DuplicatesSpec

_PAIRS = "duplicates.jsonl"


def find(spec: DuplicatesSpec) -> DuplicatesRef:
    """Write the pairs to ``spec.out_dir`` and count them.

    Raises:
        StorageError: a dataset is gone, an image is missing or damaged, or no space is left.
    """
    compared = compare_datasets(Path(spec.train.path), Path(spec.evaluation.path), spec.threads)
    lines = as_lines(compared.duplicates).encode()
    with building(spec.out_dir) as aside:
        (aside / _PAIRS).write_bytes(lines)
    kinds = Counter(pair.kind for pair in compared.duplicates)
    return DuplicatesRef(
        path=str(spec.out_dir / _PAIRS),
        digest=hashlib.sha256(lines).hexdigest(),
        train_digest=spec.train.digest,
        evaluation_digest=spec.evaluation.digest,
        problems=compared.problems,
        exact=kinds["exact"],
        near=kinds["near"],
        same_images=kinds["same_images"],
        exact_only=compared.exact_only,
    )


if __name__ == "__main__":
    job_main(find, DuplicatesSpec)
