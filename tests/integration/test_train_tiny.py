"""The real loop on the tiny policy with two Ray workers: promises 2, 3, 4, a resume that is exact, and workers that
compute each row together, with a policy that rests on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.data.synthetic import draw_problem
from rlcore.segment.journal import StepRecord, read_journal
from tests.integration import train_tiny
from tests.ranks import FORKED

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
    cut: int | None = None,
    resume: Path | None = None,
    coarse: bool = False,
) -> dict[str, Any]:
    """
    Args:
        cut: a step on the way whose checkpoint is kept in ``out / "cut"``, for another run to ``resume`` from.
    """
    out.mkdir()
    settings = {
        "experiment": config.model_dump(mode="json"), "model": str(model), "dataset": str(dataset), "out": str(out),
        "until": until, "cut": cut, "resume": str(resume) if resume else None, "coarse": coarse,
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


@pytest.fixture(scope="module")
def plain(tiny_model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepRecord]:
    """Four steps, as the experiment has them."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, tiny_model, dataset, experiment(), until=4)
    return journal(folder)


@pytest.mark.slow
def test_steps_are_on_policy_and_change_it(plain: list[StepRecord]) -> None:
    """That a cut changes nothing is shown below with everything that has a memory, and by tests of what is rarer."""
    steps = plain
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
def test_workers_that_share_rows_and_rest_train_as_workers_that_do_not(
    plain: list[StepRecord], tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Rows of twice the tokens; the same completions at first, and the same numbers but for float noise."""
    config = experiment(**{"training.sequence_parallel": 2, "training.offload": True})
    run(tmp_path / "shared", tiny_model, dataset, config, until=2)
    shared = journal(tmp_path / "shared")
    assert len(shared) == 2
    for name in ("loss/policy", "loss/kl_ref", "loss/entropy", "optim/grad_norm", "reward/mean"):
        assert shared[0].metrics[name] == pytest.approx(plain[0].metrics[name], rel=1e-4, abs=1e-6), name
    for record in shared:
        assert record.metrics["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert record.metrics["rollout/abs_delta_logprob_max"] < 1e-4


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
    whole = run(tmp_path / "whole", until=8, cut=6, **options)
    second = run(tmp_path / "second", until=8, resume=tmp_path / "whole" / "cut", **options)
    assert second["tokens"] == tokens_after(6, whole) != []
    assert whole["weights_at_cut"] != whole["weights"]
    assert second["weights"] == whole["weights"]

    steps = [record.metrics for record in journal(tmp_path / "whole")]
    # the second update of a batch has left the policy that sampled it, to whose log-probs its ratios go; in the last
    # batch there are groups of the buffer, which an older policy sampled
    assert [metrics["loss/ratio_max"] for metrics in steps[:6:2]] == [1.0] * 3
    assert all(metrics["loss/ratio_max"] > 1.0 for metrics in [*steps[1::2], steps[6]])
    batches = [metrics for metrics in steps if "rollout/rounds" in metrics]
    assert len(batches) == 4
    assert batches[3]["rollout/groups_from_buffer"] > 0  # the memory was needed where the run was cut
    assert len({metrics["loss/kl_coefficient"] for metrics in batches}) == 4
    assert all(metrics["rollout/groups_trained"] == 4 for metrics in batches)
    assert all("reward/kl_penalty" in metrics for metrics in batches)
    # log-probs of a distribution that top-p has cut agree with the trainer's once what was kept is known
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in batches) < 1e-4
    assert min(metrics["rollout/effective_sample_size"] for metrics in batches) > 0.999
