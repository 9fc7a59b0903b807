"""The result page of a run: curves, samples, cost and lineage, in the run's folder, in Prefect and in MLflow."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict

from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.tracker import Tracker
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelRef
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest
from tasks.driver.outbox import prefect_outage_named
from tasks.lineage import Lineage, lineage_of
from tasks.report.completions import log_completions
from tasks.report.contamination import Contamination, contamination_of, log_contamination
from tasks.report.cost import RunCost, run_cost
from tasks.retries import step
from tasks.run import Run, tracker_of

# Autoescape, so that text of a model or a dataset is never HTML.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_SAMPLES_SHOWN = 12
_TEXT_SHOWN = 600
_PHASES_LEFT_OUT = ("time/step", "time/generate_beside")  # the sum of the others; time that overlaps with them


class RunSummary(BaseModel):
    """The result of a run. Rewards are means over the first and the last tenth of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracy_before: float
    accuracy_after: float
    reward_first: float
    reward_last: float
    steps: int
    segments: int
    wall_seconds: float
    mlflow_run_id: str
    checkpoint: str
    merged_model: str


PANELS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "accuracy": ("reward/accuracy", "reward/format"),
    "KL": ("loss/kl_ref", "loss/kl_old", "teacher/kl"),
    "clip fraction": ("loss/clip_fraction",),
    "|delta log-prob| sampler to trainer": ("rollout/abs_delta_logprob_mean",),
    "entropy": ("loss/entropy",),
    "gradient norm": ("optim/grad_norm",),
    "groups all right, all wrong": ("rollout/all_right", "rollout/all_wrong"),
}
"""Title of each small plot to the metrics in it."""


def draw_curves(records: Sequence[StepRecord], evaluations: Sequence[EvalReport]) -> Figure:
    """Small plots of the journal with the evaluations and their intervals, and seconds per phase.

    Args:
        evaluations: in the order of their steps.
    """
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = list(figure.subplots(3, 3).flat)
    for axis, (title, metrics) in zip(axes, PANELS.items(), strict=False):
        for name in metrics:
            _line(axis, records, name)
        axis.set_title(title, fontsize=10)
    for axis, attribute in ((axes[0], "reward"), (axes[1], "accuracy")):
        _evaluations(axis, evaluations, attribute)
    _phases(axes[len(PANELS)], records)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, frameon=False)
    return figure


def _line(axis: Axes, records: Sequence[StepRecord], name: str) -> None:
    points = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
    if points:
        axis.plot(*zip(*points, strict=True), label=name, linewidth=1.3)


def _evaluations(axis: Axes, reports: Sequence[EvalReport], attribute: str) -> None:
    middles = [getattr(item, attribute) for item in reports]
    lows = [middle - getattr(item, f"{attribute}_low") for item, middle in zip(reports, middles, strict=True)]
    highs = [getattr(item, f"{attribute}_high") - middle for item, middle in zip(reports, middles, strict=True)]
    steps = [item.step for item in reports]
    axis.errorbar(steps, middles, yerr=[lows, highs], fmt="o-", linewidth=1, markersize=4, capsize=3, color="black",
                  label="held out (95 %)")  # fmt: skip


def _phases(axis: Axes, records: Sequence[StepRecord]) -> None:
    timed = [record for record in records if "time/step" in record.metrics]
    names = sorted({name for record in timed for name in record.metrics if name.startswith("time/")})
    names = [name for name in names if name not in _PHASES_LEFT_OUT]
    if names:
        values = [[record.metrics.get(name, 0.0) for record in timed] for name in names]
        labels = [name.removeprefix("time/") for name in names]
        axis.stackplot([record.step for record in timed], values, labels=labels)
    axis.set_title("seconds per phase", fontsize=10)


class Sample(BaseModel):
    """One completion that the trainer saved for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    problem_id: str
    question: str
    answer: str
    images: tuple[str, ...]  # content hashes
    completion: str
    tokens: int
    finish_reason: str
    reward: float
    parts: dict[str, float]
    graded: bool


def sample_files(run: Run) -> dict[int, Path]:
    """Steps whose completions were saved, with the file of each."""
    return {
        int(path.stem.removeprefix("step-")): path for path in sorted((run.run_dir / "samples").glob("step-*.json"))
    }


def read_step(run: Run, step: int) -> list[Sample]:
    """All saved completions of a step, problem by problem."""
    return [Sample(step=step, **row) for row in json.loads(sample_files(run)[step].read_text())]


def read_samples(run: Run) -> list[Sample]:
    """Completions of the first and the last steps, spread over the run."""
    steps = list(sample_files(run))
    chosen = steps if len(steps) <= 4 else [steps[0], steps[len(steps) // 3], steps[2 * len(steps) // 3], steps[-1]]
    return [sample for step in chosen for sample in read_step(run, step)[: _SAMPLES_SHOWN // 4]]


@dataclass(frozen=True, slots=True)
class Page:
    """What the page of a run shows."""

    run: Run
    summary: RunSummary
    before: EvalReport
    after: EvalReport
    model: ModelRef
    validation: DatasetRef
    samples: Sequence[Sample]
    cost: RunCost
    lineage: Lineage
    contamination: Contamination | None = None  # None: duplicates were not looked for

    def markdown(self) -> str:
        """The page as Prefect shows it."""
        summary, model = self.summary, self.model
        rows = "\n".join(f"| {' | '.join(cells)} |" for cells in self._results())
        shown = "\n".join(
            f"| {item.step} | {_cell(item.question)} | {_cell(item.answer)} | {_cell(item.completion)} "
            f"| {item.reward:.2f} |"
            for item in self.samples
        )
        return (
            f"# {self.run.run_id}\n\n| | before | after |\n| --- | --- | --- |\n{rows}\n\n"
            f"Training reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} in {summary.steps} steps, "
            f"{summary.segments} segments, {summary.wall_seconds:.0f} s.\n\n"
            f"- model: `{model.path}` (registered: {model.registered_name} version {model.registered_version})\n"
            f"- checkpoint: `{summary.checkpoint}`\n- MLflow run: `{summary.mlflow_run_id}`\n"
            f"- page with curves and pictures: `{self.run.report_dir / 'report.html'}`\n\n"
            f"{self._duplicates()}"
            f"## Cost\n\n{_markdown_rows(self.cost.rows())}\n## Lineage\n\n{_markdown_rows(self.lineage.rows())}\n"
            "## Completions\n\n"
            f"| step | question | answer | completion | reward |\n| --- | --- | --- | --- | --- |\n{shown}\n"
        )

    def _duplicates(self) -> str:
        """The section on duplicates as Prefect shows it; empty if there are none."""
        shown = self.contamination
        if shown is None or not shown.found.found:
            return ""
        pairs = "".join(
            f"| {item.likeness} | {_cell(item.validation.question)} | {_cell(item.training.question)} |\n"
            for item in shown.pairs
        )
        table = f"| duplicate | validation | training |\n| --- | --- | --- |\n{pairs}\n" if pairs else ""
        return f"## Duplicates in training\n\n{_markdown_rows(shown.counts())}\n{table}"

    def html(self, curves: Path) -> str:
        """The page as one HTML file with all images inside, so that it can be sent to others."""
        summary, model = self.summary, self.model
        facts = {
            "run": self.run.run_id,
            "steps, segments": f"{summary.steps}, {summary.segments}",
            "training reward, first and last tenth": f"{summary.reward_first:.3f}, {summary.reward_last:.3f}",
            "wall time": f"{summary.wall_seconds:.0f} s",
            "model": f"{model.path} ({model.registered_name} version {model.registered_version})",
            "checkpoint": summary.checkpoint,
            "MLflow run": summary.mlflow_run_id,
            "validation data": f"{self.validation.source} ({self.validation.digest})",
        }
        if self.contamination is not None:
            facts["validation problems that training has too"] = self.contamination.found.text
        images = image_folder(self.run)
        shown = [
            (item, [data_uri(path) for name in item.images if (path := images / f"{name}.png").exists()])
            for item in self.samples
        ]
        return TEMPLATES.get_template("report.html.jinja").render(
            run=self.run, results=self._results(), curves=data_uri(curves), facts=facts.items(),
            cost=self.cost.rows(), lineage=self.lineage.rows(), samples=shown, text_shown=_TEXT_SHOWN,
            duplicates=self.contamination, data_uri=data_uri)  # fmt: skip

    def _results(self) -> list[tuple[str, str, str]]:
        def interval(item: EvalReport, name: str) -> str:
            low, high = getattr(item, f"{name}_low"), getattr(item, f"{name}_high")
            return f"{getattr(item, name):.3f} [{low:.3f}, {high:.3f}]"

        def row(name: str, text: Callable[[EvalReport], str]) -> tuple[str, str, str]:
            return name, text(self.before), text(self.after)

        return [
            row("accuracy, held out [95 %]", lambda item: interval(item, "accuracy")),
            *([self.contamination.row()] if self.contamination and self.contamination.found.found else []),
            row("reward, held out [95 %]", lambda item: interval(item, "reward")),
            row("cut at the length limit", lambda item: f"{item.truncated:.3f}"),
            row("problems x samples", lambda item: f"{item.num_problems} x {item.samples_per_problem}"),
        ]


def _markdown_rows(rows: Sequence[tuple[str, str]]) -> str:
    lines = "\n".join(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)
    return f"| | |\n| --- | --- |\n{lines}\n"


def _cell(text: str) -> str:
    return as_text(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}...")


_ADDRESS = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=@)", re.IGNORECASE)
_MARKS = re.compile(r"[^\w\s,.:;?'\"()%\u0080-\U0010ffff]|_")


def as_text(text: str) -> str:
    """One line of markdown that shows ``text`` literally, never as an image, link, HTML or table.

    Otherwise a reader's browser would send requests to addresses that a model or a dataset wrote. Punctuation becomes
    entities; a zero-width space inside an address keeps renderers from making it a link.
    """
    line = re.sub(r"[\x00-\x1f\x7f]", " ", text)
    return _MARKS.sub(lambda match: f"&#{ord(match[0])};", _ADDRESS.sub("\u200b", line))


def image_folder(run: Run) -> Path:
    """Folder of the run's training images, from the trainer's spec."""
    spec = run.run_dir / "spec.json"
    return Path(json.loads(spec.read_text())["dataset"]["path"]) / "images" if spec.exists() else run.run_dir


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


_SHARE_AT_ENDS = 0.1


@step("report", others=(5,))
def report(
    run: Run,
    validation: DatasetRef,
    before: EvalReport,
    after: EvalReport,
    segments: Sequence[SegmentManifest],
    model: ModelRef,
    merged: CheckpointRef,
    wall_seconds: float,
) -> RunSummary:
    """Write the page, show it in Prefect and MLflow, and return the summary.

    Args:
        model: what was registered, made from the checkpoint ``merged``.
    """
    records, tracker = run.journal(), tracker_of(run, Settings())
    summary = summarize(records, before, after, segments, model, merged, wall_seconds, tracker.mlflow_run_id)
    samples = read_samples(run)
    folder = run.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = _all_evaluations(run, before, after)
    draw_curves(records, evaluations).savefig(folder / "curves.png", dpi=110)
    listed = [item.model_dump(mode="json") for item in evaluations]
    (folder / "evaluations.json").write_text(json.dumps(listed, indent=1))
    cost = run_cost(run.run_dir, run.experiment, records, evaluations)
    (folder / "cost.json").write_text(cost.model_dump_json(indent=1))
    lineage = lineage_of(run, model, merged, tracker.mlflow_run_id)
    contamination = contamination_of(run, validation, before, after)
    page = Page(run, summary, before, after, model, validation, samples, cost, lineage, contamination)
    text = page.markdown()
    (folder / "report.html").write_text(page.html(folder / "curves.png"))
    with prefect_outage_named():
        create_markdown_artifact(text, key=f"{run.experiment.name}-report")
    _log(tracker, run, text, samples, segments, model)
    tracker.log_metrics(cost.metrics(), step=records[-1].step, timestamp_ms=records[-1].timestamp_ms)
    log_completions(tracker, TEMPLATES, validation, evaluations)
    if contamination is not None:
        log_contamination(tracker, contamination, evaluations)
    get_logger().info("report: %s", folder / "report.html")
    return summary


def _all_evaluations(run: Run, before: EvalReport, after: EvalReport) -> list[EvalReport]:
    """The evaluations before and after training, and between them those that the trainer made on the same problems."""
    same = [
        item.report for item in run.evaluations()
        if item.report.step not in (before.step, after.step)
        and (item.report.dataset_digest, item.report.num_problems) == (before.dataset_digest, before.num_problems)
    ]  # fmt: skip
    return sorted([before, *same, after], key=lambda report: report.step)


def summarize(
    records: Sequence[StepRecord],
    before: EvalReport,
    after: EvalReport,
    segments: Sequence[SegmentManifest],
    model: ModelRef,
    merged: CheckpointRef,
    wall_seconds: float,
    mlflow_run_id: str,
) -> RunSummary:
    rewards = [record.metrics["reward/mean"] for record in records if "reward/mean" in record.metrics]
    ends = max(1, round(_SHARE_AT_ENDS * len(rewards)))
    return RunSummary(
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        reward_first=sum(rewards[:ends]) / ends,
        reward_last=sum(rewards[-ends:]) / ends,
        steps=segments[-1].last_step,
        segments=len(segments),
        wall_seconds=round(wall_seconds, 1),
        mlflow_run_id=mlflow_run_id,
        checkpoint=merged.path,
        merged_model=model.path,
    )


def _log(
    tracker: Tracker,
    run: Run,
    text: str,
    samples: Sequence[Sample],
    segments: Sequence[SegmentManifest],
    model: ModelRef,
) -> None:
    for name in ("report.html", "curves.png"):
        tracker.log_file(run.report_dir / name, "report")
    for trace in sorted((run.run_dir / "profiles").glob("*.json.gz")):
        tracker.log_file(trace, "profiles")
    tracker.log_text(text, "report/report.md")
    if samples and "samples/completions.json" not in tracker.artifact_names("samples"):
        columns = ("step", "question", "answer", "completion", "reward", "finish_reason")
        tracker.log_table(
            {name: [getattr(item, name) for item in samples] for name in columns}, "samples/completions.json"
        )
    references = {
        "checkpoints": [manifest.checkpoint.model_dump() for manifest in segments],
        "model": model.model_dump(),
        "run_dir": str(run.run_dir),
    }
    tracker.log_text(json.dumps(references, indent=1), "references.json")
