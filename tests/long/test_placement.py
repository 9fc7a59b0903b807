"""Trainers and samplers apart, and one step off policy: the same numbers wherever they are, and after a cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_run import ALONE, APART, experiment, journal, numbers, run, tokens_after

STALE = {
    "training.max_staleness": 1,
    "algorithm.correction.name": "truncate",
    "algorithm.recompute_old_logprobs": False,
    "data.curriculum.rest_epochs": 1,
}


def test_one_step_off_policy_is_the_same_after_a_cut_and_with_all_in_one_place(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": tiny_model, "dataset": dataset}
    apart, together = experiment(**APART, **STALE), experiment(**ALONE, **STALE)
    whole = run(tmp_path / "whole", config=apart, until=4, cut=2, through_ray=True, **options)
    rest = run(tmp_path / "rest", config=together, until=4, resume=tmp_path / "whole" / "cut", **options)
    assert rest["tokens"] == tokens_after(2, whole) != []
    assert rest["weights"] == whole["weights"]
    assert numbers(tmp_path / "rest") == numbers(tmp_path / "whole")[2:]

    steps = numbers(tmp_path / "whole")
    assert [metrics["rollout/policy_age_max"] for metrics in steps] == [0, 1, 1, 1]
    assert steps[0]["rollout/abs_delta_logprob_mean"] < 1e-4
    for metrics in steps[1:]:  # sampled by the policy of the step before: seen, weighted, no alarm
        assert metrics["rollout/abs_delta_logprob_mean"] > 1e-4
        assert metrics["rollout/effective_sample_size"] < 1
        assert metrics["rollout/mismatch_alarm"] == 0
        assert metrics["loss/ratio_max"] == 1.0  # to the policy that the step starts from
    timed = journal(tmp_path / "whole")[2].metrics
    assert timed["time/generate_beside"] > 0
    assert "time/generate" not in timed


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_disaggregated_on_policy_sampling_has_the_weights_of_the_step(
    model: str, dataset: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(tmp_path / "apart", request.getfixturevalue(model), dataset, experiment(**APART), until=2)
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in numbers(tmp_path / "apart")) < 1e-4


def test_adapters_reach_ranks_that_only_sample(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**{"resources.workers": 2, "resources.rollout_workers": 1, "model.lora.rank": 4})
    run(tmp_path / "apart", tiny_model, dataset, config, until=2)
    assert max(metrics["rollout/abs_delta_logprob_mean"] for metrics in numbers(tmp_path / "apart")) < 1e-4
