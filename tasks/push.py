"""``rlflow push``: a merged model as a Hugging Face folder with a model card, here or on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.logs import get_logger, redact
from infra.settings import Settings
from rlcore.artifacts import EvalReport, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.data.messages import template_text
from rlcore.errors import ConfigError, ModelError, RlflowError
from rlcore.families import images_in
from rlcore.segment.journal import StepRecord
from rlcore.specs import ExportSpec
from tasks.compare import Known, find_evaluations
from tasks.driver.jobs import new_result_path, run_job
from tasks.lineage import read_origins
from tasks.named import Named, find_named, require_free
from tasks.report.page import draw_curves
from tasks.run import Run, existing_run

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CARD, _CURVES = "README.md", "curves.png"
_PRIVATE = (
    "resources.",
    "segment.",
    "recovery.",
    "health",
    "data.train",
    "data.validation",
    "data.mixture",
    "model.path",
)
"""Settings of machines, and those that may be paths: the card names data and model by their sources."""


def push_model(words: str, target: str, settings: Settings, *, dtype: str = "bfloat16", private: bool = True) -> str:
    """Write the model that ``words`` names to a folder, or upload it to the hub. Returns where it is.

    Args:
        target: a new folder, or owner/name. A path with more than one slash, or one that starts with ``.``, ``/`` or
            ``~``, is a folder.

    Raises:
        ConfigError: there is no such model, it is not merged, or the folder exists.
        ModelError: the hub refuses.
    """
    model = find_named(words, settings)
    if model.adapters is not None:
        raise ConfigError(f"{words}: step {model.step} is not merged yet. Merge it: rlflow merge {model.run_id}.")
    hub = _HUB_ID.fullmatch(target) is not None and not Path(target).parent.is_dir()
    out = settings.models_dir / f"pushed-{target.replace('/', '--')}" if hub else Path(target).expanduser().absolute()
    require_free(out)
    if out.exists():
        out.rmdir()  # it is empty
    spec = ExportSpec.model_validate(
        {
            "result": new_result_path(settings, "export"),
            "model": ModelRef(path=str(model.folder), digest="", source=model.name, num_parameters=0),
            "out": out,
            "dtype": dtype,
            "trust_remote_code": model.experiment.model.trust_remote_code,
        }
    )
    exported = run_job("rlcore.jobs.export", spec, ModelRef, settings)
    run = _run_of(model, settings)
    records = run.journal() if run is not None else []
    reports = _evaluations(model, settings)
    if records:
        before_and_after = sorted((item.report for item in reports if item.suite == _first(reports)), key=_step)
        draw_curves(records, before_and_after).savefig(out / _CURVES, dpi=110)
    (out / _CARD).write_text(model_card(model, exported, run, records, reports, dtype), encoding="utf-8")
    get_logger().info("push: %s, %.1f M parameters in %s", out, exported.num_parameters / 1e6, dtype)
    return _upload(out, target, private=private) if hub else str(out)


def _upload(folder: Path, name: str, *, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=name))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"the hub did not take {name}: {error}. Check the network and the token in HF_TOKEN. The folder is whole, "
            f"and can be uploaded later: {folder}"
        ) from error


def _run_of(model: Named, settings: Settings) -> Run | None:
    try:
        return existing_run(model.run_id, settings)
    except RlflowError:  # another machine has it
        return None


def _evaluations(model: Named, settings: Settings) -> list[Known]:
    """Of the model and of where its run started, if they are on this machine."""
    found: list[Known] = []
    for step in dict.fromkeys((0, model.step)):
        try:
            found += find_evaluations(f"{model.run_id}:{step}", settings)
        except RlflowError:  # not evaluated, or another machine has it
            continue
    return found


def _first(reports: Sequence[Known]) -> str:
    return reports[0].suite if reports else ""


def _step(report: EvalReport) -> int:
    return report.step


def model_card(
    model: Named,
    exported: ModelRef,
    run: Run | None,
    records: Sequence[StepRecord],
    reports: Sequence[Known],
    dtype: str,
) -> str:
    """The README of a published model. It names no folder, host or user of this machine."""
    origins = read_origins(run.run_dir) if run is not None else []
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(model), sort_keys=False)}---\n",
        f"# {model.experiment.name}\n",
        f"{_public(model.experiment.model.path)} after {model.step} optimizer steps of {_algorithm(model.experiment)} "
        f"with rlflow. {exported.num_parameters / 1e6:.1f} M parameters in {dtype}.\n",
        "## Evaluation\n",
        _evaluation_table(reports) if reports else "Not evaluated on the machine that wrote this card.\n",
    ]
    if records:
        parts += ["## Training\n", f"![Curves of the run]({_CURVES})\n", _reward_line(records)]
    parts += ["## Prompts\n", _prompts(model.experiment), "## Data\n", _table(("split", "data"), _data(model, origins))]
    parts += ["## Settings\n", "Those that differ from rlflow's defaults.\n"]
    parts += [_table(("setting", "value"), _settings(model.experiment)), "## Lineage\n"]
    parts += [_table(("what", "value"), _lineage(model, exported, origins))]
    return redact("\n".join(parts))


def _front_matter(model: Named) -> dict[str, Any]:
    experiment = model.experiment
    sees = images_in(model.folder) is not None
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if sees else "text-generation",
        "tags": ["rlflow", "reinforcement-learning", "grpo"],
    }
    if _HUB_ID.fullmatch(experiment.model.path):
        values["base_model"] = experiment.model.path
    sources = [item.train for item in experiment.data.sources("train").values()] or [experiment.data.train]
    if datasets := [name for source in sources if _HUB_ID.fullmatch(name := source.partition("@")[0])]:
        values["datasets"] = datasets
    return values


def _algorithm(experiment: ExperimentConfig) -> str:
    algorithm = experiment.algorithm
    return f"reinforcement learning (advantage {algorithm.advantage.name}, loss {algorithm.loss.name})"


def _evaluation_table(reports: Sequence[Known]) -> str:
    rows = [
        (
            item.suite,
            str(item.report.step),
            f"{item.report.num_problems} x {item.report.samples_per_problem}",
            f"{item.report.accuracy:.3f}",
            f"[{item.report.accuracy_low:.3f}, {item.report.accuracy_high:.3f}]",
            f"{item.report.reward:.3f}",
            f"[{item.report.reward_low:.3f}, {item.report.reward_high:.3f}]",
        )
        for item in reports
    ]
    head = ("suite", "step", "problems x samples", "accuracy", "95 % interval", "reward", "95 % interval")
    return f"{_table(head, rows)}\nStep 0 is the model that training started from.\n"


def _reward_line(records: Sequence[StepRecord]) -> str:
    rewards = [record.metrics["reward/mean"] for record in records if "reward/mean" in record.metrics]
    if not rewards:
        return ""
    return f"Mean reward of the first step {rewards[0]:.3f}, of the last {rewards[-1]:.3f}.\n"


def _prompts(experiment: ExperimentConfig) -> str:
    data = experiment.data
    lines = [
        "Training wrote the question into this template (Jinja, `content` is the question):\n",
        f"```text\n{template_text(data.template).rstrip()}\n```\n",
        f"System prompt: {'none' if data.system_prompt is None else repr(data.system_prompt)}. Arguments of the chat "
        f"template: {data.chat_template_arguments or 'none'}. Completions had at most "
        f"{experiment.rollout.max_completion_tokens} tokens, prompts at most {data.max_prompt_tokens}, images "
        f"{data.min_pixels} to {data.max_pixels} pixels.\n",
    ]
    return "\n".join(lines)


def _data(model: Named, origins: Sequence[Any]) -> Iterator[tuple[str, str]]:
    if not origins:
        yield "train", _public(model.experiment.data.train)
        yield "validation", _public(model.experiment.data.validation)
        return
    for split in ("train", "validation"):
        dataset = getattr(origins[-1], split)
        yield (
            split,
            f"{_public(dataset.source)}: {dataset.num_problems} problems, {dataset.num_images} images, digest "
            f"{dataset.digest[:16]}",
        )


def _settings(experiment: ExperimentConfig) -> Iterator[tuple[str, str]]:
    defaults = ExperimentConfig(name=experiment.name).flat()
    for key, value in experiment.flat().items():
        if key != "name" and not key.startswith(_PRIVATE) and defaults.get(key) != value:
            yield key, _public(str(value))


def _lineage(model: Named, exported: ModelRef, origins: Sequence[Any]) -> Iterator[tuple[str, str]]:
    yield "run", f"{model.run_id}, step {model.step}"
    if model.version is not None:
        yield "registered as", model.version
    yield "experiment", model.experiment.digest()
    yield "digest of the model's files", exported.digest
    for origin in origins[-1:]:
        yield "started from", f"{_public(origin.base.source)} ({origin.base.digest})"
        yield "code", f"commit {origin.commit or 'unknown'}, digest {origin.code_digest}"
        yield "packages", ", ".join(f"{name} {version}" for name, version in origin.versions.items())


def _public(text: str) -> str:
    """Without the folders of this machine."""
    return Path(text).name if text.startswith(("/", "~", ".")) else text


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
