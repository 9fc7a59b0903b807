"""The real loop on the tiny policy: promises 2, 3, 4 and a resume that is exact, with two Ray workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.data.synthetic import draw_problem
from rlcore.segment.journal import StepRecord, read_journal

ROOT = Path(__file__).parents[2]


def experiment(**overrides: Any) -> ExperimentConfig:
    return build_experiment(
        {
            "name": "tiny",
            "model": {"gradient_checkpointing": "none"},
            "data": {"max_prompt_tokens": 200, "template": "tiny", "synthetic_problems": 24},
            "rollout": {"group_size": 4, "max_completion_tokens": 16, "temperature": 0.8},
            "algorithm": {"kl": {"coefficient": 0.01}, "recompute_old_logprobs": True},
            "training": {"problems_per_step": 4, "steps": 4, "learning_rate": 1e-3, "tokens_per_microbatch": 1024},
            "resources": {"workers": 2, "device": "cpu"},
        },
        [f"{key}={json.dumps(value)}" for key, value in overrides.items()],
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("datasets"), experiment(), None)


@pytest.fixture(scope="module")
def mixed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems with no picture, one, and two."""
    folder = tmp_path_factory.mktemp("mixed")
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
    return prepared(folder, experiment(), folder / "mixed.jsonl")


def prepared(folder: Path, config: ExperimentConfig, source: Path | None) -> Path:
    from rlcore.data.images import resize
    from rlcore.data.problems import prepare
    from rlcore.job import PrepareSpec, ResizeSpec

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
    resume: Path | None = None,
    coarse: bool = False,
) -> dict[str, Any]:
    out.mkdir()
    settings = {
        "experiment": config.model_dump(mode="json"), "model": str(model), "dataset": str(dataset), "out": str(out),
        "until": until, "resume": str(resume) if resume else None, "coarse": coarse,
    }  # fmt: skip
    (out / "settings.json").write_text(json.dumps(settings))
    subprocess.run(
        [sys.executable, "-m", "tests.integration.train_tiny", str(out / "settings.json")], check=True, cwd=ROOT
    )
    return json.loads((out / "result.json").read_text())


def journal(out: Path) -> list[StepRecord]:
    return read_journal(out / "journal.jsonl")


@pytest.mark.slow
def test_a_run_in_two_halves_equals_the_whole_run_bit_for_bit(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment()
    whole = run(tmp_path / "whole", tiny_model, dataset, config, until=4)
    first = run(tmp_path / "first", tiny_model, dataset, config, until=2)
    second = run(tmp_path / "second", tiny_model, dataset, config, until=4, resume=tmp_path / "first" / "checkpoint")
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert first["weights"] != whole["weights"]  # two steps did change them
    assert second["weights"] == whole["weights"]

    steps = journal(tmp_path / "whole")
    assert [record.step for record in steps] == [1, 2, 3, 4]
    for record in steps:
        metrics = record.metrics
        assert metrics["loss/ratio_max"] == 1.0  # on-policy, with the old log-probs from a pass of their own
        assert metrics["loss/clip_fraction"] == 0.0
        assert metrics["rollout/abs_delta_logprob_mean"] < 1e-4  # vLLM and FSDP2 agree, weights of this very step
        assert metrics["rollout/abs_delta_logprob_max"] < 1e-3
        assert metrics["optim/grad_norm"] > 0
    assert steps[0].metrics["loss/kl_ref"] < 1e-9
    assert steps[3].metrics["loss/kl_ref"] > 1e-6
    assert steps[3].metrics["reward/mean"] != steps[0].metrics["reward/mean"]


@pytest.mark.slow
def test_several_updates_per_batch_leave_the_sampling_policy(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**{"training.updates_per_batch": 2})
    run(tmp_path / "run", tiny_model, dataset, config, until=2)
    first, second = journal(tmp_path / "run")
    assert first.metrics["loss/ratio_max"] == 1.0
    assert second.metrics["loss/ratio_max"] > 1.0  # its old log-probs are of the weights before the first update
    assert second.metrics["rollout/abs_delta_logprob_mean"] < 1e-4  # those, too, are what the sampler drew from


@pytest.mark.slow
def test_everything_with_a_memory_resumes_bit_for_bit_on_mixed_problems(
    tiny_model: Path, mixed_dataset: Path, tmp_path: Path
) -> None:
    """Two updates per batch, a buffer of surplus groups, an adaptive KL in the reward, pass rates, and top-p; steps of
    problems with no picture, one and two, so that a rank may have none."""
    config = experiment(
        **{
            "training.updates_per_batch": 2,
            "training.steps": 8,
            "rollout.top_p": 0.9,
            "algorithm.correction.name": "truncate",
            "algorithm.dynamic_sampling.max_staleness": 4,
            "algorithm.kl.place": "reward",
            "algorithm.kl.estimator": "k1",
            "algorithm.kl.adaptive.horizon": 100,
            "data.curriculum.rest_epochs": 1,
        }
    )
    options: dict[str, Any] = {"model": tiny_model, "dataset": mixed_dataset, "config": config, "coarse": True}
    whole = run(tmp_path / "whole", until=8, **options)
    first = run(tmp_path / "first", until=6, **options)
    second = run(tmp_path / "second", until=8, resume=tmp_path / "first" / "checkpoint", **options)
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert second["weights"] == whole["weights"]

    batches = [record.metrics for record in journal(tmp_path / "whole") if "rollout/rounds" in record.metrics]
    assert len(batches) == 4
    assert batches[3]["rollout/groups_from_buffer"] > 0  # the memory was needed where the run was cut
    assert len({metrics["loss/kl_coefficient"] for metrics in batches}) == 4
    assert all(metrics["rollout/groups_trained"] == 4 for metrics in batches)
    assert all("reward/kl_penalty" in metrics for metrics in batches)
    # log-probs of a distribution that top-p has cut agree with the trainer's once what was kept is known
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in batches) < 1e-4
    assert min(metrics["rollout/effective_sample_size"] for metrics in batches) > 0.999
