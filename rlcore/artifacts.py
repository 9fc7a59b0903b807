"""References that Prefect tasks exchange: small, JSON, and content-addressed if possible."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict


class Artifact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceRows(Artifact):
    """What one source of a mixture gave to a dataset."""

    name: str
    source: str
    digest: str  # of the source's own dataset
    num_problems: int
    num_rejected: int


class DatasetRef(Artifact):
    """A prepared dataset: ``problems.parquet``, ``rejects.jsonl``, ``report.json`` and ``images/`` in one folder."""

    path: str
    digest: str  # of source content and settings
    source: str
    num_problems: int
    num_rejected: int
    num_images: int  # distinct
    max_prompt_tokens: int  # longest prompt kept, image tokens included
    sources: tuple[SourceRows, ...] = ()  # of a mixture


class DuplicatesRef(Artifact):
    """The problems of an evaluation that training has too."""

    path: str  # duplicates.jsonl, one pair a line
    digest: str  # of the file
    train_digest: str
    evaluation_digest: str
    problems: int  # of the evaluation
    exact: int
    near: int
    same_images: int
    exact_only: bool  # all problems are drawn, and near duplicates were not looked for

    @property
    def found(self) -> int:
        """Problems of the evaluation with a duplicate of any kind."""
        return self.exact + self.near + self.same_images

    @property
    def text(self) -> str:
        """The counts in words."""
        kinds = "" if self.exact_only else f", near {self.near}, same_images {self.same_images}"
        return f"{self.found} of {self.problems} problems: exact {self.exact}{kinds}"


class ModelRef(Artifact):
    """A Hugging Face folder: config, safetensors, tokenizer, processor, generation config."""

    path: str
    digest: str
    source: str
    num_parameters: int
    registered_name: str | None = None
    registered_version: str | None = None


class CheckpointRef(Artifact):
    """A pointer to a committed train state. Its manifest is authoritative."""

    path: str
    step: int
    policy_version: int
    manifest_sha256: str
    run_id: str
    segment: int


class EndpointRef(Artifact):
    """A model behind an OpenAI-compatible server."""

    url: str  # up to /v1
    model: str  # as the server names it
    key_variable: str  # environment variable with the key; the key itself is stored nowhere
    concurrency: int  # requests at a time

    @property
    def path(self) -> str:
        """The policy's name in a report."""
        return f"{self.model} at {self.url}"


class EvalReport(Artifact):
    """Accuracy and reward of one policy on one dataset."""

    policy: str  # path of the checkpoint or model; of an endpoint its name
    step: int
    dataset_digest: str
    num_problems: int
    samples_per_problem: int
    accuracy: float  # pass@1: mean over problems of the share of right samples
    accuracy_low: float  # 95% bootstrap interval over problems
    accuracy_high: float
    reward: float
    reward_low: float
    reward_high: float
    truncated: float  # share of completions that hit the length cap
    ungraded: float  # share without a verdict
    table: str  # parquet path: one row per completion
    seconds: float
    details: dict[str, float] = {}  # further metrics: pass_at_2 and its _low and _high, majority_at_2, group/...
    at: float = 0.0  # creation time, seconds since the epoch; 0: made before this field existed


class EvalReports(Artifact):
    """The result of an evaluation on several datasets, in their order."""

    reports: tuple[EvalReport, ...]


class SuiteReport(Artifact):
    """A policy's result on one benchmark suite."""

    suite: str
    report: EvalReport
    set_aside: int  # problems that could not be used, such as those whose prompt is too long; they are in no mean
    clean: dict[str, float] = {}  # accuracy_clean, its _low and _high, clean_problems; empty: training data unknown


class SuiteReports(Artifact):
    """A policy's results on benchmark suites."""

    model: str
    suites: tuple[SuiteReport, ...]

    def markdown(self) -> str:
        """A table with one row per suite."""
        head: tuple[str, ...] = (
            *("suite", "accuracy", "95 % interval", "pass@k", "problems", "samples", "set aside", "cut", "tokens"),
        )
        cells = [_suite_row(item) for item in self.suites]
        if any(item.clean for item in self.suites):
            head = (*head, "clean problems", "accuracy, clean", "95 % interval")
            cells = [(*row, *_clean_cells(item.clean)) for row, item in zip(cells, self.suites, strict=True)]
        rows = [head, ("---",) * len(head), *cells]
        return f"{self.model}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _suite_row(item: SuiteReport) -> tuple[str, ...]:
    report = item.report
    ks = [int(name.removeprefix("pass_at_")) for name in report.details if re.fullmatch(r"pass_at_\d+", name)]
    return (
        item.suite,
        f"{report.accuracy:.3f}",
        f"{report.accuracy_low:.3f} to {report.accuracy_high:.3f}",
        ", ".join(f"{report.details[f'pass_at_{k}']:.3f} (k={k})" for k in ks) or "-",
        str(report.num_problems),
        str(report.samples_per_problem),
        str(item.set_aside),
        f"{report.truncated:.1%}",
        f"{report.details['completion_tokens_mean']:.0f}",
    )


def _clean_cells(clean: dict[str, float]) -> tuple[str, str, str]:
    number = f"{clean['clean_problems']:.0f}" if clean else "-"
    if "accuracy_clean" not in clean:
        return number, "-", "-"
    interval = f"{clean['accuracy_clean_low']:.3f} to {clean['accuracy_clean_high']:.3f}"
    return number, f"{clean['accuracy_clean']:.3f}", interval


class CheckRow(Artifact):
    """One comparison of a model's implementations."""

    name: str
    largest: float  # difference
    spread: float  # root mean square of the differences
    allowed_largest: float
    allowed_spread: float
    unit: str  # nats, or share: of the size of what is compared
    place: str  # where the largest difference is; of a refused row also where hidden states part first
    passed: bool


class ModelCheck(Artifact):
    """The comparison of the trainer, transformers and vLLM on a model folder."""

    path: str
    digest: str
    layers: str  # which decoder layers were compared
    dtype: str  # of the trainer
    device: str
    versions: dict[str, str]
    rows: tuple[CheckRow, ...]
    seconds: float
    seconds_of_parts: dict[str, float] = {}

    @property
    def worst(self) -> str:
        """The comparison that comes closest to what is allowed."""
        row = max(self.rows, key=lambda row: row.largest / row.allowed_largest)
        return f"{row.largest:.2g} of {row.allowed_largest:.2g} {row.unit} ({row.name})"

    @property
    def took(self) -> str:
        """Seconds of the whole comparison and of its parts."""
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds_of_parts.items())
        return f"{self.seconds:.0f} s" + (f" ({parts})" if parts else "")

    def markdown(self) -> str:
        """The table, and what it was measured with."""
        head = "| check | result | largest | allowed | mean square | allowed | unit | where |\n" + "| --- " * 8 + "|\n"
        lines = [
            f"| {r.name} | {'agrees' if r.passed else 'DIFFERS'} | {r.largest:.2g} | {r.allowed_largest:.2g} | "
            f"{r.spread:.2g} | {r.allowed_spread:.2g} | {r.unit} | {r.place} |\n"
            for r in self.rows
        ]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{head}{''.join(lines)}\n{self.layers}, {self.dtype} on {self.device}, {self.took}. {versions}\n"
