"""Find the evaluations of runs, folders and registered models, and compare them: ``rlflow compare``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from json import dumps
from pathlib import Path

from pydantic import ValidationError

from infra.settings import Settings
from infra.tracking.results import find_model
from rlcore.artifacts import EvalReport
from rlcore.config import read_experiment
from rlcore.errors import ConfigError
from rlcore.evaluation.comparison import AgainstFirst, Evaluated, SuiteComparison, compare_on_suite
from rlcore.evaluation.records import TABLE, ValidationRecord
from rlcore.evaluation.rows import read_rows
from tasks.champion import evaluations
from tasks.lineage import read_origins
from tasks.run import Run, existing_run

OWN = "validation"
"""Name of the suite that consists of a run's own validation problems."""
_REPORT = "report.json"
_WAYS = (
    "RUN or RUN:STEP, a run's folder, the folder of an evaluation (with completions.parquet), a parquet file of "
    "completions, or a registered model NAME@ALIAS or NAME/VERSION"
)


@dataclass(frozen=True, slots=True)
class Known:
    """An evaluation whose rows are not read yet."""

    suite: str  # empty: a folder or file, which does not tell
    report: EvalReport


def compare_policies(names: Sequence[str], settings: Settings, alpha: float = 0.05) -> list[SuiteComparison]:
    """Compare the policies with the first one, on every suite that it and another one were evaluated on.

    Raises:
        ConfigError: a name cannot be resolved, has no evaluation, or there is no common suite.
    """
    if len(set(names)) != len(names) or len(names) < 2:
        raise ConfigError(f"compare needs at least two different policies, found {', '.join(names)}.")
    known = {name: find_evaluations(name, settings) for name in names}
    first, *others = names
    comparisons = []
    for suite in known[first]:
        partners = {other: partner for other in others if (partner := _partner(suite, known[other])) is not None}
        if partners:
            named = next((item.suite for item in (suite, *partners.values()) if item.suite), "unnamed")
            rows = [_read(other, partner, named) for other, partner in partners.items()]
            comparison = compare_on_suite(_read(first, suite, named), rows, alpha)
            lacking = [f"{other} has no evaluation on it" for other in others if other not in partners]
            comparisons.append(comparison.model_copy(update={"notes": (*comparison.notes, *lacking)}))
    if not comparisons:
        listed = "; ".join(f"{name}: {', '.join(map(_shown, items))}" for name, items in known.items())
        raise ConfigError(
            f"no suite on which {first} and another policy were evaluated. Found: {listed}. Evaluate them on the same "
            "data: rlflow evaluate RUN --on EXPERIMENT."
        )
    return comparisons


def _shown(known: Known) -> str:
    return f"{known.suite or 'unnamed'} (step {known.report.step}, data {known.report.dataset_digest[:8] or 'unknown'})"


def _partner(wanted: Known, known: Sequence[Known]) -> Known | None:
    """The evaluation on the same data, of the same name if there are several; else one of the same name; else one whose
    data are unknown and that has some of the problems."""
    digest = wanted.report.dataset_digest
    same_data = [item for item in known if digest and item.report.dataset_digest == digest]
    same_name = [item for item in known if item.suite and item.suite == wanted.suite]
    both = [item for item in same_data if item in same_name]
    unknown = (item for item in known if not (digest and item.report.dataset_digest) and _shares(wanted, item))
    return next(chain(both, same_data, same_name, unknown), None)


def _shares(one: Known, other: Known) -> bool:
    """Whether both have a problem."""
    ids = ({row.problem_id for row in read_rows(Path(item.report.table))} for item in (one, other))
    return bool(set.intersection(*ids))


def _read(policy: str, known: Known, suite: str) -> Evaluated:
    report = known.report
    return Evaluated(policy, suite, report.dataset_digest, report.step, read_rows(Path(report.table)))


def find_evaluations(name: str, settings: Settings) -> list[Known]:
    """The evaluations of what a user named, one per suite: the newest step of a run, or the step that is named.

    Raises:
        ConfigError: there is no such thing, or it was not evaluated.
    """
    path = Path(name)
    if path.exists() and not (path.name == name and (settings.runs_dir / name).exists()):
        return _of_path(path)
    if re.search(r"[@/]", name):
        model = find_model(settings.tracking_uri, name)
        run_id, step = model.tags.get("rlflow.run_id"), model.tags.get("rlflow.step")
        if run_id is None or step is None:
            raise ConfigError(
                f"{name}: rlflow did not register version {model.version}, so its evaluations are unknown. "
                f"Allowed: {_WAYS}."
            )
        return _of_run(existing_run(run_id, settings), settings, int(step))
    run_id, _, step = name.partition(":")
    if step and not step.isdigit():
        raise ConfigError(f"{name}: after the colon belongs a step, such as {run_id}:40. Allowed: {_WAYS}.")
    return _of_run(existing_run(run_id, settings), settings, int(step) if step else None)


def _of_path(path: Path) -> list[Known]:
    if (path / "experiment.json").exists():
        run = Run(run_id=path.name, run_dir=path, experiment=read_experiment(path / "experiment.json"))
        return _of_run(run, None, None)
    table = path / TABLE if path.is_dir() else path
    if not table.exists() or table.suffix != ".parquet":
        raise ConfigError(f"{path} has no {TABLE}. Allowed: {_WAYS}.")
    report = _report_in(table.parent) if table.name == TABLE else None
    if report is None:
        rows = read_rows(table)
        report = EvalReport(
            policy=str(path), step=0, dataset_digest="", num_problems=len({row.problem_id for row in rows}),
            samples_per_problem=1 + max(row.sample for row in rows), accuracy=0, accuracy_low=0, accuracy_high=0,
            reward=0, reward_low=0, reward_high=0, truncated=0, ungraded=0, table=str(table), seconds=0,
        )  # fmt: skip
    return [Known("", report)]


def _report_in(folder: Path) -> EvalReport | None:
    """The report of an evaluation's folder, of either kind; None: there is none."""
    path = folder / _REPORT
    if not path.exists() or not (folder / TABLE).exists():
        return None
    data = path.read_bytes()
    try:
        report = ValidationRecord.model_validate_json(data).report
    except ValidationError:
        report = EvalReport.model_validate_json(data)
    return report.model_copy(update={"table": str(folder / TABLE)})


def _of_run(run: Run, settings: Settings | None, step: int | None) -> list[Known]:
    found = [Known(OWN, record.report) for record in run.evaluations()]
    found += [Known(item.benchmark, item.report) for item in evaluations(run)]
    if settings is not None:
        found += _by_jobs(run, settings, {item.report.dataset_digest: item.suite for item in found})
    here = [item for item in found if Path(item.report.table).exists()]
    chosen: dict[str, Known] = {}
    for item in sorted(here, key=lambda item: (item.report.step, item.report.at)):
        if step in (None, item.report.step):
            chosen[item.suite] = item
    if not chosen:
        steps = ", ".join(map(str, sorted({item.report.step for item in here}))) or "none"
        asked = "" if step is None else f" of step {step}"
        raise ConfigError(
            f"run {run.run_id} has no evaluation{asked} on this machine. Evaluated steps: {steps}. Name one of them, "
            "or evaluate its newest checkpoint: rlflow evaluate RUN."
        )
    return list(chosen.values())


def _by_jobs(run: Run, settings: Settings, suites: Mapping[str, str]) -> list[Known]:
    """The evaluations of the run's checkpoints by ``rlflow evaluate`` and by flows, in processes of their own.

    Args:
        suites: names of suites by the digest of their data.
    """
    own = {origin.validation.digest: OWN for origin in read_origins(run.run_dir)}
    found = []
    for path in sorted(settings.evaluations_dir.glob(f"*/{_REPORT}")):
        report = _report_in(path.parent)
        if report is not None and Path(report.policy).is_relative_to(run.run_dir):
            digest = report.dataset_digest
            found.append(Known({**suites, **own}.get(digest, f"data {digest[:8]}"), report))
    return found


def format_comparisons(comparisons: Sequence[SuiteComparison], *, json: bool = False) -> str:
    """Tables to read in a terminal, or one JSON object."""
    if json:
        return dumps({"suites": [item.model_dump(mode="json") for item in comparisons]})
    return "\n\n".join(_table(item) for item in comparisons)


def _table(comparison: SuiteComparison) -> str:
    _, *others = comparison.policies
    (confidence,) = {f"{item.against_first.confidence:.4g}" for item in others if item.against_first}
    head = ("policy", "step", "problems", "accuracy", "95 % interval", "minus first",
            f"{100 * float(confidence):.4g} % interval", "e-value", "verdict")  # fmt: skip
    rows = [head]
    for item in comparison.policies:
        against = item.against_first
        rows.append(
            (
                item.policy,
                "" if item.step is None else str(item.step),
                f"{item.problems} x {item.samples}",
                f"{item.accuracy:.3f}",
                f"[{item.accuracy_low:.3f}, {item.accuracy_high:.3f}]",
                f"{against.difference:+.3f}" if against else "",
                f"[{against.low:+.3f}, {against.high:+.3f}]" if against else "",
                f"{against.e_value:.3g}" if against else "",
                _verdict(against) if against else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    several = f" (Bonferroni: 0.05 / {len(others)} for each of {len(others)} comparisons)" if len(others) > 1 else ""
    needed = others[0].against_first.needed_e_value if others[0].against_first else 0
    about = f"An e-value of {needed:.4g} decides{several}, at whatever number of problems one looks."
    return "\n".join([f"suite {comparison.suite}", *lines, about, *(f"note: {note}" for note in comparison.notes)])


def _verdict(against: AgainstFirst) -> str:
    if against.verdict != "undecided":
        return f"{against.verdict} than the first: decided after {against.decided_after} of {against.problems} problems"
    if against.more_problems is None:
        return "undecided: no difference to be seen"
    return f"undecided: about {against.more_problems} more problems like these"
