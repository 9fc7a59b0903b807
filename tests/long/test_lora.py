"""The real loop with adapters, a frozen vision tower, or bfloat16 master weights: Ray, FSDP2 and vLLM, and a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import ExperimentConfig
from rlcore.models.loading import load_hf_model
from tests.integration.engine_bench import measured
from tests.integration.tiny_run import experiment, journal, run, tokens_after
from tests.train_states import load_full_weights, save_train_state


def configured(workers: int = 2, **model: Any) -> ExperimentConfig:
    values = experiment(**{"resources.workers": workers}).model_dump(mode="json")
    values["training"]["optimizer"] = model.pop("optimizer", "adamw")
    values["model"] |= model
    return ExperimentConfig.model_validate(values)


def _evaluated(config: ExperimentConfig, dataset: Path, checkpoint: Path, model: Path) -> dict[str, Any]:
    """What an evaluation's engine samples from the checkpoint, against the policy that the checkpoint was taken of."""
    from rlcore.distributed.worker import WorkerSpec, evaluation_worker

    spec = WorkerSpec.alone(model, dataset, config, "cpu")
    worker = evaluation_worker(spec, checkpoint=checkpoint, version=7)

    import numpy as np

    from rlcore.data.pixels import ImageStore
    from rlcore.data.table import load_problems
    from rlcore.rollout.groups import in_order, to_sample
    from tests.numerics import toy
    from tests.sampling import sample_requests

    store = ImageStore(dataset)
    problems = load_problems(dataset)[:4]
    for problem in problems:
        toy.PICTURES.update({image.sha256: store.read(image) for image in problem.images})
    policy = toy.policy(model, config)
    groups = in_order(worker.generate(sample_requests(problems, 2, seed=0, batch="0")))
    samples = [
        to_sample(p, g.prompt_token_ids, c) for p, g in zip(problems, groups, strict=True) for c in g.completions
    ]

    def delta() -> float:
        found = policy.logprobs([samples])[0]
        return max(float(np.abs(f.logprobs - s.sampler_logprobs).max()) for f, s in zip(found, samples, strict=True))

    to_base = delta()
    policy.load(checkpoint)
    return {"to_base": to_base, "delta": delta(), "version": samples[0].policy_version}


def test_the_loop_trains_adapters_and_a_resumed_run_equals_an_unbroken_one(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Of one rank; two that train adapters, with a third that samples, are in test_placement."""
    config = configured(lora={"rank": 8, "alpha": 32.0, "vision_tower": True}, workers=1)
    whole = run(tmp_path / "whole", tiny_model, dataset, config, until=2, cut=1)
    second = run(tmp_path / "second", tiny_model, dataset, config, until=2, resume=tmp_path / "whole" / "cut")
    assert second["tokens"] == tokens_after(1, whole) != []
    assert whole["weights_at_cut"] != whole["weights"]
    assert second["weights"] == whole["weights"]
    steps = journal(tmp_path / "whole")
    for record in steps:
        assert record.metrics["loss/ratio_max"] == 1.0
        assert record.metrics["rollout/abs_delta_logprob_max"] < 1e-4
        assert record.metrics["optim/grad_norm"] > 0
    assert steps[0].metrics["loss/kl_ref"] == 0.0  # adapters off, and adapters at 0, are the same to the last bit
    assert steps[1].metrics["loss/kl_ref"] > 1e-6
    result = measured(partial(_evaluated, config, dataset, tmp_path / "whole" / "checkpoint"), tiny_model)
    assert result["delta"] < 1e-4
    assert result["to_base"] > 1e-3
    assert result["version"] == 7


def _shaken_checkpoint(model: Path, config: ExperimentConfig, folder: Path) -> dict[str, Any]:
    """Every weight of the model changed, and committed as a run would."""
    from tests.numerics import toy

    policy = toy.policy(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_train_state(policy.model.hf, policy.optimizer, folder)
    return {}


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_an_evaluation_samples_from_a_checkpoint_of_its_own_policy(
    model: str, dataset: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A checkpoint keeps a tied tensor once; the engine holds, and proves, it once per use."""
    folder, config = request.getfixturevalue(model), configured(workers=1)
    measured(partial(_shaken_checkpoint, config=config, folder=tmp_path), folder)
    result = measured(partial(_evaluated, config, dataset, tmp_path), folder)
    assert result["delta"] < 1e-4
    assert result["to_base"] > 1e-3


def test_the_loop_trains_in_bfloat16_with_a_frozen_vision_tower(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    config = configured(freeze_vision_tower=True, optimizer="adamw_bf16")
    run(tmp_path / "run", tiny_model, dataset, config, until=2)
    weights = load_full_weights(tmp_path / "run" / "checkpoint")
    start = load_hf_model(tiny_model, torch.bfloat16).state_dict()
    assert all(torch.equal(value, start[name]) == ("visual" in name) for name, value in weights.items())
    for record in journal(tmp_path / "run"):
        assert record.metrics["rollout/abs_delta_logprob_mean"] < 0.05  # the engine computes in float32 on CPU
