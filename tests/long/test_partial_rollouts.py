"""Partial rollouts with the real sampler and the real loop: what is continued, and that neither a cut of the run nor
its placement changes a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.engine_bench import Bench, measured
from tests.integration.tiny_run import ALONE, APART, CORRECTED, PARTIAL, experiment, numbers, run

ROUND = 5  # tokens


def continued(model: Path) -> dict[str, Any]:
    """Problems with a picture and without: greedy completions in one go and in rounds; then groups that are begun under
    one policy and ended under another."""
    from rlcore.rollout.groups import in_order, joined, new_groups, to_sample
    from rlcore.types import SampleRequest

    bench = Bench(model, None)
    sampler, policy, problems = bench.sampler, bench.policy, bench.problems
    sampler.load_weights(policy.full_weights(), 0)
    whole = [group.completions[0] for group in in_order(sampler.generate(_greedy(problems)))]
    new: dict[str, Any] = {"batch": "0", "epoch": 0, "policy_version": 0}
    drafts = [group.completions[0] for group in new_groups(enumerate(problems), 1, **new)]
    rounds = 0
    while open_ := [i for i, draft in enumerate(drafts) if draft.finish_reason == "unfinished"]:
        asked = [
            SampleRequest(problems[i], 1, 0, greedy=True, max_tokens=ROUND, so_far=drafts[i].token_ids) for i in open_
        ]
        for i, group in zip(open_, in_order(sampler.generate(asked)), strict=True):
            drafts[i] = joined(drafts[i], group.completions[0])
        rounds += 1

    groups = new_groups(enumerate(problems), 2, **new)
    for version, budget in ((0, ROUND), (1, None)):
        asked = [(i, *request) for i, group in enumerate(groups) for request in group.requests(7, budget)]
        for (i, which, _), found in zip(
            asked, in_order(sampler.generate([request for *_, request in asked])), strict=True
        ):
            groups[i] = groups[i].continued(found, which)
        if version == 0:
            bench.shake()
            sampler.load_weights(policy.full_weights(), 1)
    samples = [to_sample(g.problem, g.prompt_token_ids, c) for g in groups for c in g.completions]
    trainer = [found.logprobs for found in policy.logprobs([samples])[0]]
    apart = [np.abs(t - s.sampler_logprobs)[s.num_prompt :] for t, s in zip(trainer, samples, strict=True)]
    return {
        "same_tokens": [
            one.token_ids.tolist() == two.token_ids.tolist() for one, two in zip(whole, drafts, strict=True)
        ],
        "same_text": [one.text == two.text for one, two in zip(whole, drafts, strict=True)],
        "ended": [(one.finish_reason, two.finish_reason) for one, two in zip(whole, drafts, strict=True)],
        "rounds": rounds,
        "nothing": in_order(sampler.generate([])),
        "unfinished": [group.unfinished for group in groups],
        "versions": {c.policy_version for group in groups for c in group.completions},
        "lengths": [len(c.token_ids) for group in groups for c in group.completions],
        "of_the_policy_before": max(float(delta[:ROUND].max()) for delta in apart),
        "of_this_policy": max(float(delta[ROUND:].max()) for delta in apart if len(delta) > ROUND),
    }


def _greedy(problems: list[Any]) -> list[Any]:
    from rlcore.types import SampleRequest

    return [SampleRequest(problem, 1, 0, greedy=True) for problem in problems]


def test_a_continued_completion_equals_one_sampled_at_once(tiny_model: Path) -> None:
    result = measured(continued, tiny_model)
    assert all(result["same_tokens"])
    assert all(result["same_text"])
    assert all(one == two for one, two in result["ended"])
    assert result["rounds"] == 7  # of 5 tokens, to the 32 of the budget
    assert result["nothing"] == []  # an engine may have nothing to continue
    # begun by policy 0 and ended by policy 1, which the trainer holds: pictures and tokens are read anew by it
    assert set(result["unfinished"]) == {()}
    assert result["versions"] == {0}
    assert max(result["lengths"]) == 32
    assert result["of_the_policy_before"] > 1e-2
    assert result["of_this_policy"] < 1e-4


def test_rounds_that_cut_nothing_are_the_plain_path(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": tiny_model, "dataset": dataset, "until": 2}
    plain = experiment(**ALONE, **CORRECTED)
    whole = {"rollout.partial.tokens_per_round": 16, "rollout.partial.in_flight": 1, "training.max_staleness": 1}
    rounds = experiment(**ALONE, **CORRECTED, **whole)
    assert run(tmp_path / "plain", config=plain, **options) == run(tmp_path / "rounds", config=rounds, **options)
    assert numbers(tmp_path / "plain") == numbers(tmp_path / "rounds")


def test_what_is_in_flight_survives_a_cut_and_another_placement(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": tiny_model, "dataset": dataset}
    apart, together = experiment(**APART, **CORRECTED, **PARTIAL), experiment(**ALONE, **CORRECTED, **PARTIAL)
    whole = run(tmp_path / "whole", config=apart, until=4, **options)
    first = run(tmp_path / "first", config=apart, until=2, **options)
    rest = run(tmp_path / "rest", config=together, until=4, resume=tmp_path / "first" / "checkpoint", **options)
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    assert rest["weights"] == whole["weights"]
    assert numbers(tmp_path / "first") + numbers(tmp_path / "rest") == numbers(tmp_path / "whole")

    steps = numbers(tmp_path / "whole")
    assert [metrics["rollout/policy_age_max"] for metrics in steps] == [0, 1, 2, 2]
    assert [metrics["rollout/groups_in_flight"] for metrics in steps] == [4] * 4
    assert all(metrics["rollout/completions_continued"] > 0 for metrics in steps[1:])  # also right after the cut
    assert all(metrics["rollout/groups_dropped_stale"] == 0 for metrics in steps)
    # in the third batch the first six tokens of each completion are of older weights than the rest
    assert steps[0]["rollout/effective_sample_size"] > 0.9999 > steps[2]["rollout/effective_sample_size"]
