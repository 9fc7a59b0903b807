"""A run of the real loop on the tiny policy with two ranks, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.segment.journal import StepRecord, read_journal
from tests.integration import train_tiny
from tests.ranks import FORKED

ALONE = {"resources.workers": 1}
APART = {"resources.workers": 1, "resources.rollout_workers": 1}
CORRECTED = {"algorithm.correction.name": "truncate", "algorithm.recompute_old_logprobs": False}
PARTIAL = {
    "rollout.partial.tokens_per_round": 6,
    "rollout.partial.in_flight": 2,
    "rollout.partial.prefetch": True,
    "training.max_staleness": 2,
    "data.curriculum.rest_epochs": 1,
}
ON_A_GPU = {
    "resources.workers": 1,
    "resources.device": "cuda",
    "rollout.gpu_memory_utilization": 0.2,
    "rollout.enforce_eager": True,
}


def experiment(**overrides: Any) -> ExperimentConfig:
    return build_experiment(
        {
            "name": "tiny",
            "model": {"gradient_checkpointing": "none"},
            "data": {"max_prompt_tokens": 200, "template": "tiny", "synthetic_problems": 24},
            "rollout": {"group_size": 4, "max_completion_tokens": 16, "temperature": 0.8},
            "algorithm": {"kl": {"coefficient": 0.01}, "recompute_old_logprobs": True},
            "training": {"problems_per_batch": 4, "steps": 4, "learning_rate": 1e-3, "tokens_per_microbatch": 1024},
            "resources": {"workers": 2, "device": "cpu"},
        },
        [f"{key}={json.dumps(value)}" for key, value in overrides.items()],
    )


def prepared(folder: Path, config: ExperimentConfig, source: Path | None) -> Path:
    from rlcore.jobs.prepare import prepare
    from rlcore.jobs.resize import resize
    from rlcore.specs import PrepareSpec, ResizeSpec

    raw = prepare(
        PrepareSpec(
            result=folder / "a",
            source=config.data.train if source is None else str(source),
            source_path=source,
            split="train",
            data=config.data,
            model=config.model,
            datasets_dir=folder,
        )
    )
    spec = ResizeSpec(
        result=folder / "b", dataset=raw, data=config.data, model=config.model, datasets_dir=folder, processes=1
    )
    return Path(resize(spec).path)


def run(
    out: Path,
    model: Path,
    dataset: Path,
    config: ExperimentConfig,
    *,
    until: int,
    cut: int | None = None,
    resume: Path | None = None,
    coarse: bool = False,
    through_ray: bool = False,
    validation: Path | None = None,
    teacher: Path | None = None,
) -> dict[str, Any]:
    """
    Args:
        cut: a step on the way whose checkpoint is kept in ``out / "cut"``, for another run to ``resume`` from.
        through_ray: the ranks are Ray's actors, as in production and on every GPU. Forked ranks compute the same and
            start in a fifth of the time.
        validation: a dataset to evaluate on while it trains, and before.
    """
    out.mkdir()
    settings = {
        "experiment": config.model_dump(mode="json"), "model": str(model), "dataset": str(dataset), "out": str(out),
        "until": until, "cut": cut, "resume": str(resume) if resume else None, "coarse": coarse,
        "validation": str(validation) if validation else None, "teacher": str(teacher) if teacher else None,
        "through_ray": through_ray or config.resources.device == "cuda",
    }  # fmt: skip
    process = FORKED.Process(target=train_tiny.main, args=(settings,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads((out / "result.json").read_text())


def tokens_after(step: int, result: dict[str, Any]) -> list[str]:
    return [text for text in result["tokens"] if int(text.partition(" ")[0]) > step]


def journal(out: Path) -> list[StepRecord]:
    return read_journal(out / "journal.jsonl")


def mixed_problems(folder: Path, config: ExperimentConfig) -> Path:
    """Twelve problems with no picture, one, or two, prepared for the policy of ``config``."""
    rows = []
    for index in range(12):
        pictures = [draw_problem("train", 2 * index + n, 0).picture for n in range(index % 3)]
        paths = [folder / f"{index}-{n}.png" for n in range(len(pictures))]
        for path, picture in zip(paths, pictures, strict=True):
            picture.save(path)
        rows.append(
            {"problem": "<image>" * len(paths) + f"How many? {index}", "answer": "3", "images": [*map(str, paths)]}
        )
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return prepared(folder, config, folder / "mixed.jsonl")


def mixture_of_two(folder: Path, **overrides: Any) -> tuple[ExperimentConfig, Path]:
    """An experiment with three pictures for each sum, whose template is its own, and its dataset of 12 and 7 problems
    as training gets it."""
    from rlcore.artifacts import DatasetRef
    from rlcore.data.prepare.folder import existing_dataset
    from rlcore.jobs.mix import mix
    from rlcore.specs import MixSpec

    template = folder / "sum.jinja"
    template.write_text("Add: {{ content }}")
    sums = folder / "sums.jsonl"
    sums.write_text("\n".join(json.dumps({"problem": f"{n}+4=?", "answer": str(n + 4)}) for n in range(7)))
    sources = {
        "pictures": {"source": "synthetic-geometry@train", "weight": 3},
        "sums": {"source": str(sums), "template": str(template)},
    }
    config = experiment(**{"data.mixture": sources, "data.synthetic_problems": 12}, **overrides)
    parts: dict[str, DatasetRef] = {}
    for name, data in config.data.sources("train").items():
        own = config.model_copy(update={"data": data})
        ready = existing_dataset(prepared(folder, own, sums if name == "sums" else None))
        assert ready is not None
        parts[name] = ready
    return config, Path(mix(MixSpec(result=folder / "m", parts=parts, data=config.data, datasets_dir=folder)).path)


def numbers(out: Path) -> list[dict[str, float]]:
    """What is the same in equal runs: all but seconds and memory."""
    left_out = ("time/", "system/", "perf/update_tokens_per", "perf/update_tflops")
    return [
        {name: value for name, value in record.metrics.items() if not name.startswith(left_out)}
        for record in journal(out)
    ]
