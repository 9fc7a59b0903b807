"""The trainer in a process of its own, with forked ranks in place of Ray's and the real grader of its experiment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rlcore.config import ExperimentConfig


def run_trainer(spec: Path) -> NoReturn:
    import rlcore.training.assemble as assemble
    from rlcore.jobs.segment import main
    from tests.integration.forked_ranks import ForkedRanks

    @contextmanager
    def graded_ranks(
        config: ExperimentConfig,
        make: Any,
        *,
        model: Path,
        dataset: Path,
        verdicts: Path,
        stacks: Path,
        on_progress: Callable[[], None],
        on_retry: Callable[[], None],
        teacher: Path | None,
    ) -> Iterator[Any]:
        ranks = ForkedRanks(make, model=model, dataset=dataset, config=config, device="cpu")
        grader = assemble.make_grader(config, model, verdicts, on_progress, on_retry)
        try:
            yield ranks, grader
        finally:
            grader.close()
            ranks.close()

    log = (spec.parent / "trainer.log").open("ab")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    assemble.graded_ranks = graded_ranks
    sys.exit(main(spec))
