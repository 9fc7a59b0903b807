"""``rlflow contamination``: what an evaluation and its training data have in common, as tables."""

from __future__ import annotations

from pathlib import Path

from infra.provenance import usable_cores
from rlcore.data.contamination import as_lines, compare_datasets, summary
from rlcore.data.table import load_problems
from rlcore.errors import ConfigError
from rlcore.evaluation.report import whole_and_clean
from rlcore.evaluation.rows import EvalRow, read_rows
from rlcore.files import write_atomically

_SHOWN = 5


def contamination_tables(train: Path, evaluation: Path, *, completions: Path | None, pairs: Path | None) -> str:
    """Markdown tables: the number of duplicates by kind, the first pairs, and accuracy on the clean part.

    Args:
        train, evaluation: folders of prepared datasets.
        completions: table of an evaluation on the problems of ``evaluation``.
        pairs: file to write, one JSON object a line for each duplicate.

    Raises:
        StorageError: a folder is no prepared dataset, or an image is missing or damaged.
        ConfigError: ``completions`` is no table of an evaluation, or is of other problems.
    """
    compared = compare_datasets(train, evaluation, usable_cores())
    found = compared.duplicates
    text = summary(found, compared.problems)
    if compared.exact_only:
        text += "\nAll problems are drawn, so only exact duplicates were looked for.\n"
    if found:
        text += "\n| evaluation | training | kind | similarity of texts | different bits of images |\n" + "| --- " * 5
        text += "|\n"
    for pair in found[:_SHOWN]:
        text += f"| {pair.evaluation_id} | {pair.training_id} | {pair.kind} | {pair.similarity:.2f} | {pair.bits} |\n"
    if pairs is not None:
        write_atomically(pairs, as_lines(found).encode())
    if completions is None:
        return text
    text += "\n| problems | number | accuracy | 95 % interval |\n| --- | --- | --- | --- |\n"
    parts = whole_and_clean(
        _rows(completions, {problem.problem_id for problem in load_problems(evaluation)}),
        {p.evaluation_id for p in found},
    )
    for name, part in parts.items():
        text += f"| {name} | {part.problems} | {part.accuracy:.3f} | {part.low:.3f} to {part.high:.3f} |\n"
    return text


def _rows(path: Path, known: set[str]) -> list[EvalRow]:
    import pyarrow as pa

    try:
        rows = read_rows(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(
            f"{path} is no table of completions: {error}. Name a parquet file of an evaluation, such as "
            "completions.parquet in validation/step-000040 of a run."
        ) from error
    others = sorted({row.problem_id for row in rows} - known)
    if others or not rows:
        what = f"problems that the dataset lacks, such as {others[0]!r}" if others else "no rows"
        raise ConfigError(f"{path} has {what}. Name the completions of an evaluation on this dataset.")
    return rows
