"""Checkpoints of older versions, which stored groups in three files: they load, and the run continues unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.rollout.groups import Group
from rlcore.rollout.state import RolloutState
from rlcore.training.run import TrainState
from rlcore.types import Completion, SampledGroup
from tests.unit.toy_lengths import PROBLEMS, batches, by_first, config, same, wired
from tests.unit.toy_run import in_flight, prefetched, surplus

SCORE = pa.struct([("reward", pa.float64()), ("parts", pa.map_(pa.string(), pa.float64())), ("graded", pa.bool_())])
COMPLETION = [
    ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("policy_version", pa.int64()),
    ("score", SCORE),
]
# Column of an older version -> field of a sample today.
LOGPROBS = {"old_logprobs": "old_logprobs", "log_kept": "truncation_logprobs", "ref_logprobs": "ref_logprobs"}
SCORED = pa.schema(
    [
        ("problem_id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("baseline", SCORE),
        ("rollouts", pa.list_(pa.struct([*COMPLETION, *((name, pa.list_(pa.float32())) for name in LOGPROBS)]))),
    ]
)
IN_FLIGHT = pa.schema(
    [
        ("problem_id", pa.string()),
        ("batch", pa.int64()),
        ("epoch", pa.int64()),
        ("occurrence", pa.int64()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completions", pa.list_(pa.struct(COMPLETION))),
    ]
)


def completions(group: Group) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            "score": score and {"reward": score.reward, "parts": [*score.parts.items()], "graded": score.graded},
        }
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]


def scored(group: Group) -> dict[str, Any]:
    values = [{column: getattr(sample, field) for column, field in LOGPROBS.items()} for sample in group.samples]
    rows = [{name: None if row is None else row[2:] for name, row in sample.items()} for sample in values]
    rollouts = [completion | row for completion, row in zip(completions(group), rows, strict=True)]
    return {"problem_id": group.problem.problem_id, "prompt_token_ids": [1, 2], "baseline": None, "rollouts": rollouts}


def unready(group: Group) -> dict[str, Any]:
    batch, _, occurrence = group.seed_key.partition("#")
    return {
        "problem_id": group.problem.problem_id,
        "batch": int(batch),
        "epoch": group.epoch,
        "occurrence": int(occurrence or 0),
        "prompt_token_ids": group.prompt_token_ids,
        "completions": completions(group),
    }


def write_as_before(state: TrainState, folder: Path) -> None:
    (folder / "pass_rates.json").write_text(state.rollouts.pass_rates.to_json())
    for name, rows, schema in (
        ("buffer", [scored(group) for group in surplus(state)], SCORED),
        ("ahead", [scored(group) for group in prefetched(state)], SCORED),
        ("in_flight", [unready(group) for group in in_flight(state)], IN_FLIGHT),
    ):
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"{name}.parquet")


@pytest.mark.parametrize(
    ("partial", "staleness", "dynamic", "kept"),
    [
        (None, 0, {"max_rounds": 3, "surplus_staleness": 2}, (1, 0, 0)),
        (None, 1, None, (0, 2, 0)),
        ({"tokens_per_round": 3, "in_flight": 1.5}, 1, None, (0, 0, 1)),
        ({"tokens_per_round": 3, "in_flight": 2, "prefetch": True}, 3, None, (0, 2, 2)),
    ],
)
def test_the_files_of_older_versions_load_and_the_run_goes_on(
    tmp_path: Path,
    partial: dict[str, object] | None,
    staleness: int,
    dynamic: dict[str, object] | None,
    kept: tuple[int, int, int],
) -> None:
    settings = config(partial, staleness, algorithm={"dynamic_sampling": dynamic}, data={"curriculum": {}})
    run = wired(settings, by_first(10, 12, 1, 3, 99, 10, 9), equal={PROBLEMS[3].problem_id, PROBLEMS[13].problem_id})
    state = TrainState()
    while (len(surplus(state)), len(prefetched(state)), len(in_flight(state))) != kept:
        _, state = batches(run, state, 1)
        assert state.step < 12
    write_as_before(state, tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS, mask_truncated=False)
    going_on, end = batches(run, state, 3)
    resumed, other = batches(run, loaded, 3)
    for one, two in zip(going_on, resumed, strict=True):
        same(one, two)
        assert (one.counts, one.age_max, one.from_buffer) == (two.counts, two.age_max, two.from_buffer)
    assert end.scalars() == other.scalars()
    assert end.rollouts.pass_rates == other.rollouts.pass_rates


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routes_are_stored(tmp_path: Path, dtype: type) -> None:
    routes = np.arange(2 * 3 * 2, dtype=dtype).reshape(2, 3, 2)
    group = Group.new(0, PROBLEMS[0], 2, seed_key="0", epoch=0, policy_version=0)
    begun = Completion.one_turn(np.array([7], np.int32), np.array([-1.0], np.float32), "a", "unfinished", 0, routes)
    answer = SampledGroup(np.array([1, 2], np.int32), (begun,))
    state = RolloutState(groups=(group.continued(answer, (1,)),))
    state.save(tmp_path)
    loaded = RolloutState.load(tmp_path, {"problems_seen": 1, "step": 0}, PROBLEMS, mask_truncated=False)
    without, found = (completion.routes for completion in loaded.groups[0].completions)
    assert without is None
    assert found.dtype == dtype
    assert np.array_equal(found, routes)
