"""Translation of other trainers' configurations to rlflow's: a ledger that accounts for every given key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from rlcore.config.base import flatten
from rlcore.config.experiment import ExperimentConfig
from rlcore.errors import ConfigError

Verdict = Literal["translated", "same", "listed"]
OWN_REWARD = (
    "its signature is another one: write reward(text, problem, num_tokens, finish_reason), set reward.name=user and "
    "reward.file. math is used"
)
PASS_THROUGH = "tiny"  # the prompt template that passes the prompt through unchanged
KNOWN_ROWS: Mapping[str, int] = {"hiyouga/geometry3k@train": 2101, "hiyouga/math12k@train": 12_000}
"""Number of training problems in published datasets. For others the user gives --rows."""


@dataclass(frozen=True, slots=True)
class Note:
    """The outcome for one key."""

    key: str
    value: object
    verdict: Verdict  # same: rlflow does the same; listed: rlflow has no equivalent
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.value)}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Translation:
    """An experiment, and a note on every key it was made from."""

    experiment: ExperimentConfig
    values: dict[str, Any]  # of the experiment, as in prefect.yaml: without its name and what is the default
    notes: tuple[Note, ...]

    def having(self, verdict: Verdict) -> list[Note]:
        return [note for note in self.notes if note.verdict == verdict]


@dataclass(slots=True)
class Ledger:
    """The keys of a foreign configuration and that trainer's defaults. Each given key gets one note."""

    given: Mapping[str, Any]  # dotted
    defaults: Mapping[str, Any]
    out: dict[str, Any] = field(default_factory=dict)  # dotted keys of ours
    notes: list[Note] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """The given value of ``key`` or that trainer's default. Makes no note."""
        return self.given.get(key, self.defaults.get(key))

    @property
    def longest_sequence(self) -> int:
        """Tokens."""
        return int(self.get("data.max_prompt_length")) + int(self.get("data.max_response_length"))

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per rollout batch."""
        return int(self.out["training.mini_batches"] * self.out["training.ppo_epochs"])

    def put(self, ours: str, value: Any, *keys: str, text: str = "") -> None:
        """Set rlflow's key ``ours``, which replaces ``keys``."""
        self.out[ours] = value
        self._note(keys, "translated", f"{ours}: {json.dumps(value)}{f', {text}' if text else ''}")

    def take(self, keys: Mapping[str, str]) -> None:
        """Give rlflow's keys the values of the other trainer's. ``keys``: theirs -> ours."""
        for theirs, ours in keys.items():
            self.put(ours, self.get(theirs), theirs)

    def choose(self, ours: str, key: str, choices: Mapping[str, str], otherwise: str) -> str | None:
        """Set ``ours`` to the choice for ``key``'s value and return it. List any other value with ``otherwise``."""
        choice = choices.get(str(self.get(key)))
        if choice is None:
            self.listed(key, text=otherwise)
        else:
            self.put(ours, choice, key)
        return choice

    def translated(self, key: str, *, text: str) -> None:
        """For a key that ``out`` has in another form."""
        self._note((key,), "translated", text)

    def same(self, *keys: str, text: str = "") -> None:
        self._note(keys, "same", text)

    def listed(self, *keys: str, text: str) -> None:
        self._note(keys, "listed", text)

    def same_if(self, key: str, *values: Any, otherwise: str, text: str = "") -> None:
        """Note that rlflow does the same for these values of ``key``. Any other value is listed with ``otherwise``."""
        if self.get(key) in values:
            self.same(key, text=text)
        else:
            self.listed(key, text=otherwise)

    def translation(self, unused: Mapping[str, str]) -> Translation:
        """The experiment. Call it last: it lists every given key that has no note yet.

        Args:
            unused: beginning of a key -> why rlflow has no equivalent. Any other key is unknown.

        Raises:
            ConfigError: the translated values make no valid experiment.
        """
        from rlcore.config.build import build_experiment

        for key in sorted(self.given.keys() - self._seen):
            reasons = (text for prefix, text in unused.items() if key.startswith(prefix))
            self.listed(key, text=next(reasons, "unknown to this translation"))
        words = [f"{key}={json.dumps(value)}" for key, value in self.out.items()]
        experiment = build_experiment({"name": _slug(self.get("trainer.experiment_name"))}, words)
        return Translation(experiment, _without_defaults(self.out, experiment), tuple(self.notes))

    def _note(self, keys: Iterable[str], verdict: Verdict, text: str) -> None:
        for key in keys:
            if key in self._seen:
                continue  # only the first note of a key counts
            self._seen.add(key)
            if key in self.given:
                self.notes.append(Note(key, self.given[key], verdict, text))


def read_foreign(path: Path | None, arguments: Iterable[str]) -> dict[str, Any]:
    """Dotted keys of a YAML file, with dotted ``key=value`` arguments (Hydra's ``+key=value`` too) over it.

    Raises:
        ConfigError: no such file, no mapping in it, or an argument without ``=``.
    """
    import yaml

    found: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds {type(tree).__name__}; a mapping of settings is needed.")
        found = dict(flatten(tree))
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"argument {argument!r} is not key=value.")
        value = yaml.safe_load(text)
        name = key.strip().lstrip("+~")
        for old in [old for old in found if old.startswith(f"{name}.")]:
            del found[old]
        found |= dict(flatten(value, name)) if isinstance(value, dict) and value else {name: value}
    # YAML 1.1 reads 1e-6 as a text
    return {key: _number(value) for key, value in found.items()}


def data(ledger: Ledger) -> None:
    """The settings of data that both trainers call the same."""
    ledger.take({
        "data.prompt_key": "data.problem_column", "data.image_key": "data.images_column",
        "data.video_key": "data.videos_column", "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_completion_tokens",
    })  # fmt: skip
    if ledger.get("data.seed") is not None:
        ledger.put("data.shuffle_seed", ledger.get("data.seed"), "data.seed")
    ledger.same_if("data.shuffle", True, otherwise="problems are always shuffled, by data.shuffle_seed")
    ledger.same_if("data.filter_overlong_prompts", True, otherwise="longer prompts are always set aside, never cut")


def sources(ledger: Ledger) -> list[str]:
    """Set the training and validation data. Several training files become a mixture, whose names are returned.

    A validation file belongs to the training file whose name it has, in the way that ``_source_name`` names files."""
    train, validation = _files(ledger.get("data.train_files")), _files(ledger.get("data.val_files"))
    named = {_source_name(file): file for file in train}
    if len(train) < 2 or len(named) < len(train):
        text = f"the first of {len(train)} files, whose names do not tell them apart" if len(train) > 1 else ""
        ledger.put("data.train", train[0] if train else "", "data.train_files", text=text)
        text = f"the first of {len(validation)} files" if len(validation) > 1 else ""
        ledger.put("data.validation", validation[0] if validation else "", "data.val_files", text=text)
        return []
    for name, file in named.items():
        ledger.out[f"data.mixture.{name}.source"] = file
        ledger.out[f"data.mixture.{name}.weight"] = 1.0
    text = (
        f"data.mixture: {', '.join(named)}. The other trainer joins the files: for its proportions, set each weight to "
        "the number of the source's problems"
    )
    ledger.translated("data.train_files", text=text)
    held_out = {_source_name(file): file for file in validation}
    if validation and held_out.keys() <= named.keys() and len(held_out) == len(validation):
        for name, file in held_out.items():
            ledger.out[f"data.mixture.{name}.validation"] = file
        ledger.translated("data.val_files", text="data.mixture.NAME.validation")
    else:
        text = f"the first of {len(validation)} files; their names are not those of the training files"
        first = validation[0] if validation else ""
        ledger.put("data.validation", first, "data.val_files", text=text if len(validation) > 1 else "")
    return list(named)


def _files(value: object) -> list[str]:
    return [str(file) for file in value] if isinstance(value, list) else [str(value)] if value else []


def _source_name(file: str) -> str:
    """gsm8k of data/gsm8k/train.parquet, rows of data/rows.parquet, geometry3k of hiyouga/geometry3k@test."""
    path = PurePath(file.partition("@")[0])
    own = path.stem if path.suffix in (".parquet", ".json", ".jsonl") else path.name
    splits = ("train", "test", "val", "validation", "dev")
    return (
        re.sub(r"[^A-Za-z0-9_-]", "-", path.parent.name if own in splits and path.parent.name else own).lstrip("_-")[
            :40
        ]
        or "data"
    )


def batches(ledger: Ledger, batch: str, mini_batch: str, ppo_epochs: str) -> None:
    """The sizes of batches, from these keys."""
    problems = int(ledger.get(batch))
    ledger.put("training.problems_per_batch", problems, batch)
    ledger.put("training.mini_batches", max(1, problems // int(ledger.get(mini_batch))), mini_batch)
    ledger.put("training.ppo_epochs", int(ledger.get(ppo_epochs)), ppo_epochs)


def steps(ledger: Ledger, rows: int | None, limit: str) -> None:
    """training.steps from ``limit``, a number of rollout batches, or else from trainer.total_epochs over the rows."""
    epochs = "trainer.total_epochs"
    rows = KNOWN_ROWS.get(str(ledger.out.get("data.train"))) if rows is None else rows
    if ledger.get(limit):
        count = int(ledger.get(limit)) * ledger.steps_per_batch
        ledger.put("training.steps", count, limit, text="rollout batches times updates")
        ledger.same(epochs, text=f"{limit} decides")
    elif rows is None:
        ledger.listed(epochs, text="give --rows, the number of training problems: an epoch is rows // batch batches")
    else:
        per_epoch = max(1, rows // ledger.out["training.problems_per_batch"])
        count = per_epoch * int(ledger.get(epochs)) * ledger.steps_per_batch
        ledger.put("training.steps", count, epochs, text=f"{rows} rows")
        ledger.same(limit)


def adaptive_kl(ledger: Ledger, kind: str, horizon: str, target: str) -> None:
    ledger.put("algorithm.kl.adaptive.target", ledger.get(target), target, kind)
    ledger.put("algorithm.kl.adaptive.horizon", int(ledger.get(horizon)), horizon)


def model(ledger: Ledger, top: str) -> None:
    ledger.take({f"{top}trust_remote_code": "model.trust_remote_code"})
    checkpointing = f"{top}enable_gradient_checkpointing"
    ledger.put("model.gradient_checkpointing", "full" if ledger.get(checkpointing) else "none", checkpointing)


def lora(ledger: Ledger, rank: str, alpha: str, targets: str) -> None:
    if int(ledger.get(rank)):
        ledger.put("model.lora.rank", int(ledger.get(rank)), rank)
        ledger.put("model.lora.alpha", float(ledger.get(alpha)), alpha)
        ledger.same_if(targets, None, "all-linear", otherwise="adapters are on every linear layer")
    ledger.same(rank, alpha, targets, text="no LoRA")


def optimizer(ledger: Ledger, trainer: str, optim: str, warmup_ratio: str) -> None:
    """AdamW and its warm-up, from the keys that begin with ``optim``."""
    rate, decay, betas = (f"{optim}{name}" for name in ("lr", "weight_decay", "betas"))
    ledger.take({rate: "training.learning_rate", decay: "training.weight_decay"})
    beta1, beta2 = ledger.get(betas)
    ledger.put("training.beta1", float(beta1), betas)
    ledger.put("training.beta2", float(beta2))
    warmup = f"{optim}lr_warmup_steps"
    given = ledger.get(warmup)
    if given is not None and int(given) >= 0:
        count = int(given) * ledger.steps_per_batch
        ledger.put("training.warmup_steps", count, warmup, text=f"{trainer} counts rollout batches")
        ledger.same(warmup_ratio, text="lr_warmup_steps decides")
    else:
        ledger.same_if(warmup_ratio, 0, otherwise="set training.warmup_steps in optimizer steps")
        ledger.same(warmup)


def rollout(ledger: Ledger, top: str, parallel: str) -> None:
    """How the engine samples, from the keys that begin with ``top``. Without ``parallel`` each worker has its own
    engine, which samples the same without communication."""
    get = ledger.get
    names = ("temperature", "top_p", "gpu_memory_utilization", "enforce_eager")
    ledger.take({f"{top}n": "rollout.group_size", **{f"{top}{name}": f"rollout.{name}" for name in names}})
    ledger.put("rollout.top_k", max(0, int(get(f"{top}top_k"))), f"{top}top_k")
    ledger.same_if(f"{top}name", "vllm", otherwise="vLLM samples")
    ledger.same_if(f"{top}ignore_eos", None, False, otherwise="a completion ends at its end token")
    if "model.lora.rank" in ledger.out:
        ledger.same_if(parallel, 1, otherwise="with adapters each worker's engine holds the whole model")
    elif parallel in ledger.given:
        ledger.put("rollout.tensor_parallel", int(get(parallel)), parallel)
    finer = {"fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    dtype = str(get(f"{top}dtype"))
    dtype = finer.get(dtype, dtype)
    if dtype in finer.values():
        ledger.put("rollout.dtype", dtype, f"{top}dtype")
    else:  # the default of engines on GPUs
        otherwise = "rollout.dtype knows float32, bfloat16, float16"
        ledger.same_if(f"{top}dtype", None, "bf16", "bfloat16", "auto", otherwise=otherwise)


def run(ledger: Ledger) -> None:
    """The settings below ``trainer.`` that both trainers call the same."""
    get = ledger.get
    workers = int(get("trainer.nnodes")) * int(get("trainer.n_gpus_per_node"))
    ledger.put("resources.workers", workers, "trainer.nnodes", "trainer.n_gpus_per_node")
    ledger.put("resources.device", "cuda")
    if int(get("trainer.save_freq")) > 0:
        ledger.put("segment.steps", int(get("trainer.save_freq")) * ledger.steps_per_batch, "trainer.save_freq")
    else:
        ledger.listed("trainer.save_freq", text="each segment ends in a checkpoint: segment.steps")
        ledger.put("segment.steps", 5 * ledger.steps_per_batch)
    ledger.same("trainer.experiment_name", text="the experiment's name")
    ledger.listed("trainer.project_name", text="MLflow's experiment has the experiment's name")
    ledger.listed("trainer.logger", text="MLflow always; RLFLOW_TRACKERS=tensorboard,wandb,swanlab for others")
    ledger.same_if("trainer.critic_warmup", 0, otherwise="there is no critic")
    ledger.same_if("trainer.val_before_train", True, otherwise="evaluation comes first, always")


def validation(ledger: Ledger, frequency: str) -> None:
    """How often the trainer evaluates. ``frequency``: the key of the number of rollout batches."""
    batches_between = int(ledger.get(frequency) or 0)
    if batches_between <= 0:
        ledger.listed(frequency, text="evaluation.every_steps: by default before step 1 and at each segment's end")
        return
    steps_between = batches_between * ledger.steps_per_batch
    every = "segment" if steps_between == ledger.out["segment.steps"] else steps_between
    ledger.put("evaluation.every_steps", every, frequency)


def _slug(text: object) -> str:
    """A valid name of an experiment."""
    cleaned = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in str(text).lower())
    return "-".join(filter(None, cleaned.split("-")))[:60] or "translated"


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _without_defaults(out: Mapping[str, Any], experiment: ExperimentConfig) -> dict[str, Any]:
    """``out`` as a tree, without what is the default."""
    defaults = ExperimentConfig(name=experiment.name).flat()
    tree: dict[str, Any] = {}
    for key, value in out.items():
        if key in defaults and defaults[key] == value:
            continue
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
