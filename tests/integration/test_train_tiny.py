"""The real loop on the tiny policy with two Ray workers: promises 2 and 4, and a resume that is exact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlcore.config import ExperimentConfig
from rlcore.data.table import load_rows
from tests.checking import make_model
from tests.integration.tiny_run import (
    ALONE,
    CORRECTED,
    PARTIAL,
    experiment,
    journal,
    mixed_problems,
    mixture_of_two,
    numbers,
    prepared,
    run,
    tokens_after,
)

MEMORIES = {
    "training.mini_batches": 2,
    "training.steps": 8,
    "rollout.top_p": 0.9,
    "algorithm.correction.name": "truncate",
    "algorithm.dynamic_sampling.surplus_staleness": 2,
    "algorithm.kl.place": "reward",
    "algorithm.kl.estimator": "k1",
    "algorithm.kl.adaptive.horizon": 100,
    "data.curriculum.rest_epochs": 1,
}


def steps_of_an_exact_resume(
    model: Path, dataset: Path, folder: Path, config: ExperimentConfig | None = None
) -> list[dict[str, float]]:
    """The metrics of eight steps, which a run from the checkpoint of the sixth repeats bit for bit."""
    config = config or experiment(**MEMORIES)
    options: dict[str, Any] = {"model": model, "dataset": dataset, "config": config, "coarse": True}
    whole = run(folder / "whole", until=8, cut=6, **options)
    second = run(folder / "second", until=8, resume=folder / "whole" / "cut", **options)
    assert second["tokens"] == tokens_after(6, whole) != []
    assert whole["weights_at_cut"] != whole["weights"]
    assert second["weights"] == whole["weights"]
    return [record.metrics for record in journal(folder / "whole")]


def test_everything_with_a_memory_resumes_bit_for_bit_on_mixed_problems(
    tiny_model: Path, mixed_dataset: Path, tmp_path: Path
) -> None:
    """Two updates per batch, a buffer of surplus groups, an adaptive KL in the reward, pass rates, and top-p; steps of
    problems with no picture, one and two, so that a rank may have none."""
    steps = steps_of_an_exact_resume(tiny_model, mixed_dataset, tmp_path)
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


def test_experts_and_features_that_enter_several_layers_resume_bit_for_bit_too(
    experts_model: Path, mixed_deepstack_dataset: Path, tmp_path: Path
) -> None:
    steps = steps_of_an_exact_resume(experts_model, mixed_deepstack_dataset, tmp_path)
    batches = [metrics for metrics in steps if "rollout/rounds" in metrics]
    assert len(batches) == 4
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in batches) < 1e-4


def test_a_mixture_resumes_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    """The same memories, with three pictures for each sum, pass rates and epochs of each source, and a surplus of
    both."""
    config, dataset = mixture_of_two(tmp_path, **MEMORIES)
    steps = steps_of_an_exact_resume(tiny_model, dataset, tmp_path, config)
    batches = [metrics for metrics in steps if "rollout/rounds" in metrics]
    taken = [(12 * m["source/pictures/epochs"], 7 * m["source/sums/epochs"]) for m in batches]
    assert [round(sum(both)) for both in taken] == [m["rollout/problems_seen"] for m in batches]
    assert all(m["source/pictures/share"] + m["source/sums/share"] == 1 for m in batches)
    assert max(m["rollout/abs_delta_logprob_mean"] for m in batches) < 1e-4  # both use the source's own template
    at_cut = json.loads((tmp_path / "whole" / "cut" / "state.json").read_text())["mixture"]
    places = [at_cut[name]["places"] for name in ("pictures", "sums")]
    assert abs(places[0] - 3 * places[1]) <= 2, "within half a place of 3 : 1"


@pytest.mark.parametrize("kind", ["internvl", "idefics3", "smolvlm"])
def test_pictures_in_tiles_are_the_same_for_sampler_and_trainer(kind: str, tmp_path: Path) -> None:
    """Two steps of problems with no picture, one and two. The sampler refuses a prompt that vLLM expands otherwise."""
    model = make_model(tmp_path / "model", kind)
    config = experiment(**ALONE, **{"model.path": str(model)})
    (tmp_path / "data").mkdir()
    run(tmp_path / "out", model, mixed_problems(tmp_path / "data", config), config, until=2)
    steps = [record.metrics for record in journal(tmp_path / "out")]
    assert len(steps) == 2
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in steps) < 1e-4
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps)


def test_recurrent_states_resume_bit_for_bit(tmp_path: Path) -> None:
    """On a CPU vLLM computes them in bfloat16, and the trainer in float32."""
    model = make_model(tmp_path / "model", "qwen3_5")
    config = experiment(**ALONE, **{"model.path": str(model), "rollout.dtype": "bfloat16"})
    (tmp_path / "data").mkdir()
    steps = steps_of_an_exact_resume(model, mixed_problems(tmp_path / "data", config), tmp_path, config)
    assert all(0 < metrics["rollout/abs_delta_logprob_mean"] < 0.1 for metrics in steps)
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps)


def test_a_teacher_and_partial_rollouts_resume_bit_for_bit(
    tiny_model: Path, untied_model: Path, mixed_dataset: Path, tmp_path: Path
) -> None:
    """Completions that two policies wrote, a teacher of another architecture beside the task's reward, and a KL to the
    reference in the loss."""
    config = experiment(
        **ALONE, **PARTIAL, **CORRECTED, **{"algorithm.teacher.path": "untied", "algorithm.teacher.coefficient": 0.1}
    )
    options: dict[str, Any] = {
        "model": tiny_model, "dataset": mixed_dataset, "config": config, "coarse": True, "teacher": untied_model
    }  # fmt: skip
    whole = run(tmp_path / "whole", until=4, cut=2, **options)
    second = run(tmp_path / "second", until=4, resume=tmp_path / "whole" / "cut", **options)
    assert second["tokens"] == tokens_after(2, whole) != []
    assert second["weights"] == whole["weights"] != whole["weights_at_cut"]
    steps = numbers(tmp_path / "whole")
    assert numbers(tmp_path / "second") == steps[2:]
    assert all(metrics["teacher/kl"] > 0.1 for metrics in steps)
    assert all(metrics["loss/kl_coefficient"] == 0.01 for metrics in steps)
    assert all(metrics["rollout/trained_zero_signal"] == 0 for metrics in steps)
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps)


def test_rows_with_their_own_chat_template_arguments_are_the_same_for_sampler_and_trainer(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two steps, which have each of the eight rows once, with and without a picture."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '<think></think>' if quick else '' }}{{ effort }}")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (84, 56), "white").save(tmp_path / "data" / "a.png")
    own = [{}, {"quick": True}, {"effort": "high"}, {"quick": True, "effort": 7}]
    rows = [
        {"problem": f"{marker}Sides?", "answer": "4", "images": ["a.png"] * len(marker[:1]), "own": cell}
        for marker in ("", "<image>") for cell in own
    ]  # fmt: skip
    source = tmp_path / "data" / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    settings = {"data.chat_template_arguments_column": "own", "model.path": str(model)}
    config = experiment(**ALONE, **settings)
    dataset = prepared(tmp_path / "data", config, source)
    run(tmp_path / "out", model, dataset, config, until=2)
    steps = [record.metrics for record in journal(tmp_path / "out")]
    assert len(steps) == 2
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in steps) < 1e-4
    # a token for each think tag and byte; a picture of 84 x 56 pixels has 3 x 2 tokens, a start and an end
    counted = [row.prompt_tokens for row in load_rows(dataset)]
    assert [length - counted[0] for length in counted] == [0, 2, 4, 3, 8, 10, 12, 11]
    assert sum(metrics["rollout/prompt_tokens_mean"] for metrics in steps) / 2 == sum(counted) / 8


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_the_first_update_of_a_batch_needs_no_pass_for_old_log_probs(
    loss: str, tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Without the pass it computes the same bits as with it."""
    settings = {"training.mini_batches": 2, "algorithm.loss.name": loss, "algorithm.correction.name": "truncate"}
    found = []
    for recomputed in (True, False):
        config = experiment(**settings, **{"algorithm.recompute_old_logprobs": recomputed})
        result = run(tmp_path / str(recomputed), tiny_model, dataset, config, until=4)
        found.append((result, numbers(tmp_path / str(recomputed))))
    with_pass, without = found
    assert without == with_pass
