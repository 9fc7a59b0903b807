"""Check everything that can fail before any worker starts, and report all findings at once."""

from __future__ import annotations

import json
import math
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from infra.errors import InfraError, ServerError, StorageError, StorageUnusableError
from infra.logs import get_logger, without_password
from infra.provenance import describe_hardware
from infra.settings import Settings
from infra.stack.servers import check_prefect, check_ray
from infra.store import download
from infra.store.disk import require_quota, usage_of
from infra.tracking.extra import check_installed
from infra.tracking.tracker import check_reachable
from rlcore.config import ExperimentConfig, ModelConfig
from rlcore.config.reward import JudgeReward, ModelReward
from rlcore.data.messages import template_text
from rlcore.data.prepare.sources import ImageCell, open_source, parse_source
from rlcore.data.rejects import Unusable
from rlcore.data.synthetic.sources import SYNTHETIC_SOURCES, check_synthetic
from rlcore.errors import ConfigError, DataError, ModelError, RlflowError
from rlcore.failures import OUTAGES
from rlcore.families import (
    FAMILIES,
    family_in,
    images_in,
    is_of_tower,
    known_family_in,
    require_adapters,
    require_pictures,
    require_videos,
)
from rlcore.types import ImageRef, Problem
from tasks.data import Split, prepare_spec, source_experiments
from tasks.driver.failures import failure_of
from tasks.driver.jobs import gpu_shortage
from tasks.driver.outbox import prefect_outage_named
from tasks.experiments import deciding_benchmark
from tasks.retries import step
from tasks.store.made import store_of

TINY_PARAMETERS = 4_000_000  # upper bound
_MERGED_BYTES = 4  # per parameter: merged models are float32
_WORKER_BYTES = 4 * 2**30  # a worker's host memory before it holds any tensor
_TRIAL_PIXELS = 512  # longest side of a picture in the trial of a reward
_FULL_DISK_RESERVE = 256 * 2**20

Error = RlflowError | InfraError


class PreflightReport(BaseModel):
    """The facts that preflight found, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    facts: dict[str, str]

    def markdown(self) -> str:
        rows = "\n".join(f"| {name} | {fact} |" for name, fact in self.facts.items())
        return f"| checked | found |\n| --- | --- |\n{rows}\n"


@step("preflight", timeout_seconds=300)
def preflight(experiment: ExperimentConfig) -> PreflightReport:
    """Check everything that can be checked without a worker.

    Raises:
        RlflowError, InfraError: the only finding, or one error that lists all of them.
    """
    report = check(experiment, Settings(), runtime.flow_run.name)
    with prefect_outage_named():
        create_markdown_artifact(report.markdown(), key=f"{experiment.name}-preflight")
    for name, fact in report.facts.items():
        get_logger().info("check: %s: %s", name, fact)
    return report


def check(experiment: ExperimentConfig, settings: Settings, run_id: str | None = None) -> PreflightReport:
    """The checks without Prefect.

    Args:
        run_id: name of the run. One that is continued has some of its checkpoints already.
    """
    teacher = experiment.algorithm.teacher
    checks: dict[str, Callable[[], str]] = {
        "machine": lambda: _machine(experiment, settings),
        "model": lambda: _policy(experiment, settings),
        **({} if teacher is None else {"teacher": lambda: _model(teacher.model, "algorithm.teacher")}),
        **({"videos": lambda: _videos(experiment.model)} if experiment.data.video_input == "native" else {}),
        **_of_sources("training data", experiment, lambda own: _data(own, "train", settings), "train"),
        **_of_sources("validation data", experiment, lambda own: _data(own, "validation", settings), "validation"),
        **_of_sources("prompt template", experiment, _template, "train"),
        **_of_sources("reward", experiment, lambda own: _reward(own, settings), "train"),
        "disk": lambda: _disk(experiment, settings, run_id),
        "host memory": lambda: _host_memory(experiment, settings),
        "store": lambda: _store(settings),
        "MLflow": lambda: _mlflow(settings),
        "Prefect": lambda: _prefect(settings),
    }
    if settings.trackers:
        checks["trackers"] = lambda: ", ".join(
            check_installed(name, settings.tracker_python) for name in settings.trackers
        )
    facts: dict[str, str] = {}
    findings: list[Error] = []
    for name, look in checks.items():
        try:
            facts[name] = look()
        except (RlflowError, InfraError) as error:
            findings.append(error)
    if findings:
        raise _combine(findings)
    return PreflightReport(facts=facts)


def _of_sources(
    what: str, experiment: ExperimentConfig, look: Callable[[ExperimentConfig], str], split: Split
) -> dict[str, Callable[[], str]]:
    """The check of a single source, or one per source of a mixture, whose errors name it."""

    def look_at(name: str, own: ExperimentConfig) -> str:
        try:
            return look(own)
        except (RlflowError, InfraError) as error:
            raise type(error)(f"data.mixture.{name}: {error}") from error

    sources = source_experiments(experiment, split)
    if "" in sources:
        return {what: partial(look, experiment)}
    return {f"{what}, {name}": partial(look_at, name, own) for name, own in sources.items()}


def _template(experiment: ExperimentConfig) -> str:
    template = experiment.data.template
    return f"{template}, {len(template_text(template))} characters"


def _combine(findings: list[Error]) -> Error:
    if len(findings) == 1:
        return findings[0]
    kinds = {type(error) for error in findings}
    if all(failure_of(error) in OUTAGES for error in findings):
        kinds = {ServerError}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    lines = "\n".join(f"- {error}" for error in findings)
    return kind(f"preflight has {len(findings)} findings:\n{lines}")


def services_away(settings: Settings) -> list[str]:
    """Errors of MLflow and the store if they do not answer. Prefect is not checked: it runs the calling flow."""
    errors: list[str] = []
    for look in (_store, _mlflow):
        try:
            look(settings)
        except (RlflowError, InfraError) as error:
            errors.append(str(error))
    return errors


def _machine(experiment: ExperimentConfig, settings: Settings) -> str:
    machine = describe_hardware()
    wanted = experiment.resources
    if settings.ray_address:
        check_ray(settings.ray_address, settings.server_timeout_seconds)
        return f"{machine}; workers run on the Ray cluster at {settings.ray_address}"
    if wanted.device == "cuda" and wanted.devices > len(machine.gpus):
        raise ConfigError(
            f"resources.workers is {wanted.workers} and resources.rollout_workers {wanted.rollout_workers} on cuda, "
            f"and this machine has {len(machine.gpus)} GPU(s). Lower one of them, set resources.device=cpu, or point "
            "RLFLOW_RAY_ADDRESS at a cluster."
        )
    short = gpu_shortage(experiment, wanted.devices, settings)
    waits = f"; {short}, so the trainer waits until others end" if short else ""
    return f"{machine}; {wanted.devices} worker(s) on {wanted.device}{waits}"


def _policy(experiment: ExperimentConfig, settings: Settings) -> str:
    """The model that is trained, and that vLLM samples from on this machine or on a cluster's."""
    found, device = _model(experiment.model), experiment.resources.device
    if not settings.ray_address and (device == "cpu" or (device == "auto" and not describe_hardware().gpus)):
        _require_sampled_on_a_cpu(experiment.model)
    return found


def _require_sampled_on_a_cpu(model: ModelConfig) -> None:
    """
    Raises:
        ModelError: vLLM cannot sample from this model on a CPU.
    """
    folder = Path(model.path)
    if model.path == "tiny":
        family = FAMILIES.get(model.tiny.family or "")
        images = None if family is None else family.images
    elif folder.is_dir():
        family, images = known_family_in(folder), images_in(folder)
    else:  # its files are not here yet
        return
    require_pictures(images, "cpu")
    if model.lora is not None:
        require_adapters(family, "cpu")


def _model(model: ModelConfig, setting: str = "model") -> str:
    if model.path == "tiny":
        return "tiny, made and warm-started here"
    folder = Path(model.path)
    if folder.is_dir():
        parameters = _check_model_folder(folder, setting)
        return f"{folder}, {parameters / 1e6:,.1f} M parameters"
    if download.looks_like_path(model.path) or model.path.count("/") != 1:
        raise ModelError(
            f"{setting}.path is {model.path!r}, and there is no folder {folder.absolute()}. Allowed are tiny, "
            "an existing folder with config.json and safetensors, or a Hugging Face id (owner/name)."
        )
    return f"{model.path} from Hugging Face"


def _videos(model: ModelConfig) -> str:
    folder, found = Path(model.path), "the model's own input"
    if model.path == "tiny" and model.tiny.family is not None:
        require_videos(model.tiny.family)
    elif (folder / "config.json").is_file():
        require_videos(str(json.loads((folder / "config.json").read_text()).get("model_type")))
    else:
        return f"{found}, if its family has one: the prepare task looks"
    return found


def _check_model_folder(folder: Path, setting: str) -> int:
    """Number of parameters of the model in a folder.

    Raises:
        ModelError: files are missing, all of which it names, or the model family is not supported.
    """
    missing = []
    if not (folder / "config.json").exists():
        missing.append("config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt")]
        extra = f" ({pickled[0].name} is pickled and is never loaded: convert it)" if pickled else ""
        missing.append(f"*.safetensors{extra}")
    if not _has_chat_template(folder):
        missing.append("chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    if missing:
        raise ModelError(
            f"the model folder {folder} has no {' and no '.join(missing)}. "
            f"Copy the missing files from the model's origin, or choose another {setting}.path."
        )
    family_in(folder)
    return sum(math.prod(shape) for path in weights for shape in _tensor_shapes(path).values())


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    config = folder / "tokenizer_config.json"
    return config.exists() and bool(json.loads(config.read_text()).get("chat_template"))


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a safetensors file, read from its header.

    Raises:
        ModelError: the header cannot be parsed, or the file is truncated.
    """
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ModelError(f"{path} is no whole safetensors file ({error}). Copy it again.") from error


def _data(experiment: ExperimentConfig, split: Split, settings: Settings) -> str:
    source = experiment.data.train if split == "train" else experiment.data.validation
    if "://" in source:
        return f"{source}, fetched by the prepare task"
    spec = prepare_spec(experiment, split, settings)
    name, part = parse_source(source, split)
    if spec.source_path is None and name in SYNTHETIC_SOURCES:
        check_synthetic(name, part, experiment.data)
        return f"{source}, generated here"
    if spec.source_path is None:
        return f"{source}, from Hugging Face"
    opened = open_source(spec, settings.jobs_dir)  # this also checks the columns
    if opened.num_rows == 0 or (opened.num_rows is None and next(opened.rows, None) is None):
        raise DataError(
            f"{source} has no rows, and at least one usable problem is needed. Name another source in data.{split}."
        )
    rows = "" if opened.num_rows is None else f", {opened.num_rows} rows"
    return f"{source}{rows}"


def _reward(experiment: ExperimentConfig, settings: Settings) -> str:
    """Grade made-up completions of the first training problem in a grading process, as training would. A judge is
    asked about the right answer."""
    from rlcore.rewards.dry_run import dry_run  # imports sympy

    reward, budget = experiment.reward, experiment.rollout.max_completion_tokens
    with tempfile.TemporaryDirectory(prefix="rlflow-preflight-") as scratch:
        problem = _first_problem(experiment, settings, Path(scratch))
        scores = dry_run(reward, max_completion_tokens=budget, problem=problem)
    if isinstance(reward, JudgeReward):
        return f"judge {reward.judge.model} at {reward.judge.url}, {scores[0].reward:g} for a right answer"
    if isinstance(reward, ModelReward):
        return f"model {reward.model.path}: one label, a chat template"
    if scores:
        return f"{experiment.reward.name}, {len(scores)} made-up completions graded"
    return f"{experiment.reward.name}, loaded; it is tried once the data is prepared"


def _first_problem(experiment: ExperimentConfig, settings: Settings, scratch: Path) -> Problem | None:
    """The first training problem, if the data is a file on this machine; None otherwise. Its pictures are in
    ``scratch``."""
    if "://" in experiment.data.train:
        return None
    spec = prepare_spec(experiment, "train", settings)
    if spec.source_path is None:
        return None
    try:
        source = open_source(spec, settings.jobs_dir)
        row = next(source.rows, None)
    except (RlflowError, InfraError):
        return None  # the training data check reports it
    if row is None:
        return None
    images = _pictures(row.images, source.folders, scratch)
    return Problem("row-0", str(row.problem), images, str(row.answer).strip(), spec.source, row.extra)


def _pictures(cells: Sequence[ImageCell], folders: Sequence[Path], scratch: Path) -> tuple[ImageRef, ...]:
    """Small PNG files of a row's images; none if one is unusable, which the preparation reports."""
    from rlcore.data.pixels import load_rgb
    from rlcore.jobs.prepare import ImageReader

    reader, images = ImageReader(folders), []
    try:
        for number, cell in enumerate(cells):
            picture, file = load_rgb(reader.read(cell)), scratch / f"{number}.png"
            picture.thumbnail((_TRIAL_PIXELS, _TRIAL_PIXELS))
            picture.save(file)
            images.append(ImageRef(f"row-0-{number}", *picture.size, file=str(file)))
    except Unusable:
        return ()
    return tuple(images)


def _disk(experiment: ExperimentConfig, settings: Settings, run_id: str | None) -> str:
    download.require_writable(settings.data_dir)
    free = download.free_bytes(settings.data_dir)
    shapes = _shapes(experiment.model)
    if shapes is None:
        require_quota(settings, 0, "the model and its checkpoints, whose size is unknown until it is downloaded,")
        return f"{free / 2**30:.1f} GiB free; the need is unknown until the model is downloaded"
    keep = experiment.segment.max_kept(experiment.num_segments)
    one = checkpoint_bytes(experiment, shapes)
    # The run's last checkpoint, and the champion of evaluate-latest if the experiment has a benchmark.
    merged = 1 if deciding_benchmark(experiment.name) is None else 2
    parameters = sum(math.prod(shape) for shape in shapes.values())
    # A new checkpoint is complete before an older one is removed.
    needed = one * (keep + 1) + merged * parameters * _MERGED_BYTES + _FULL_DISK_RESERVE
    models = f"{merged} merged model{'s' if merged > 1 else ''}"
    try:
        download.require_space(settings.runs_dir, needed, f"{keep + 1} checkpoints and {models}")
    except StorageError as error:  # a full disk before the start does not go away by waiting
        raise StorageUnusableError(
            f"{error} Or keep fewer: segment.keep_checkpoints, keep_every and keep_best make {keep} now."
        ) from error
    held = usage_of(settings.runs_dir / run_id / "checkpoints").bytes if run_id and settings.max_gib else 0
    require_quota(settings, max(0, needed - held), f"{keep + 1} checkpoints and {models}")
    parts = f"{keep + 1} checkpoints of {one / 2**30:.2f} GiB and {models}"
    return f"{free / 2**30:.1f} GiB free, {needed / 2**30:.2f} GiB needed for {parts}"


def _host_memory(experiment: ExperimentConfig, settings: Settings) -> str:
    """What the workers hold outside of GPUs: a copy of the train state, and what is offloaded or sleeps."""
    shapes, resources = _shapes(experiment.model), experiment.resources
    machine = describe_hardware()
    if shapes is None or settings.ray_address or resources.device == "cpu" or not machine.gpus:
        return f"{machine.memory_gib:.0f} GiB"
    parameters = sum(math.prod(shape) for shape in shapes.values())
    needed = _WORKER_BYTES * resources.devices + checkpoint_bytes(experiment, shapes)
    if experiment.training.offload:
        needed += checkpoint_bytes(experiment, shapes)
    if experiment.model.lora is not None and experiment.rollout.sleep != "never" and not resources.rollout_workers:
        needed += 2 * parameters * resources.workers // experiment.rollout.tensor_parallel
    if needed > machine.memory_gib * 2**30:
        raise ConfigError(
            f"the run's {resources.devices} workers need about {needed / 2**30:.0f} GiB of host memory, and this "
            f"machine has {machine.memory_gib:.0f} GiB. Lower it with training.optimizer=adamw_bf16, model.lora, "
            "training.offload=false or rollout.sleep=never, or use several machines."
        )
    return f"{machine.memory_gib:.0f} GiB, about {needed / 2**30:.0f} GiB needed"


def checkpoint_bytes(experiment: ExperimentConfig, shapes: Mapping[str, Sequence[int]]) -> int:
    """Size of one checkpoint: trained weights with optimizer state, and frozen weights unless the run trains adapters.

    Args:
        shapes: tensor shapes of the model folder, by name.
    """
    # AdamW: weight and two moments in float32; in bfloat16 also each weight's rounding error.
    frozen_bytes, trained_bytes = (2, 8) if experiment.training.optimizer == "adamw_bf16" else (4, 12)
    in_tower = {name for name in shapes if is_of_tower(name)}
    lora = experiment.model.lora
    if lora is not None:
        linear = [
            shape
            for name, shape in shapes.items()
            if len(shape) == 2 and (lora.vision_tower if name in in_tower else ".layers." in name)
        ]
        return trained_bytes * lora.rank * sum(rows + columns for rows, columns in linear)
    frozen = in_tower if experiment.model.freeze_vision_tower else set()
    return sum(math.prod(shape) * (frozen_bytes if name in frozen else trained_bytes) for name, shape in shapes.items())


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]] | None:
    """Shapes of all tensors of the model; None: not downloaded yet, or unreadable."""
    if model.path == "tiny":
        return {"tiny": (TINY_PARAMETERS,)}
    try:
        files = Path(model.path).expanduser().glob("*.safetensors")
        return {name: shape for path in files for name, shape in _tensor_shapes(path).items()} or None
    except ModelError:
        return None


def _store(settings: Settings) -> str:
    store = store_of(settings)
    if store is None:
        return "none; everything stays in the data folder"
    probe = f".preflight-{uuid.uuid4().hex}"
    store.put(probe, b"")  # a read alone would not show that writing or removing is forbidden
    store.discard(probe)
    return store.uri


def _mlflow(settings: Settings) -> str:
    check_reachable(settings.tracking_uri, settings.server_timeout_seconds)
    return without_password(settings.tracking_uri)


def _prefect(settings: Settings) -> str:
    url = PREFECT_API_URL.value()
    if not url:
        return "embedded"
    check_prefect(url, settings.server_timeout_seconds, PREFECT_API_AUTH_STRING.value())
    return str(url)
