"""Two ranks that hold one engine together: the tokens and log-probs of one rank, weights proved, a cut run exact."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_bench import Bench
from tests.integration.tiny_run import experiment, journal, run, tokens_after
from tests.ports import reserved_port
from tests.ranks import FORKED

RANKS = 2
TOGETHER = {"rollout.tensor_parallel": RANKS}


class Damaged:
    """Loads as the loader does, and then changes one weight that the engine holds."""

    def __init__(self, loader: Any, llm: Any) -> None:
        self._loader, self._llm = loader, llm

    def load(self, weights: Any) -> Any:
        loaded = self._loader.load(weights)
        self._llm.apply_model(lambda model: next(v for n, v in model.named_parameters() if "norm" in n).data.add_(1e-3))
        return loaded


def _bench_of_two(
    rank: int, port: int, model: Path, lora: dict[str, Any] | None, *, replay_routes: bool = False
) -> Bench:
    from rlcore.sampler.start import set_engine_environment

    set_engine_environment("cpu")
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    return Bench(model, lora, RANKS, replay_routes=replay_routes)


def one_of_two(rank: int, port: int, model: Path) -> dict[str, Any]:
    from rlcore.errors import SamplerError

    bench = _bench_of_two(rank, port, model, None)
    sampler, policy = bench.sampler, bench.policy
    sampler.load_weights(policy.full_weights(), 0)
    result: dict[str, Any] = {"greedy": bench.greedy(), "before": bench.delta()}
    held = sum(value.numel() for value in bench.held())
    result["share"] = held / sum(value.numel() for _, value in policy.full_weights())
    bench.shake()
    result["stale"] = bench.delta()

    sampler.load_weights(policy.full_weights(), 1)
    result |= {"after": bench.delta(), "version": bench.version()}

    loader = sampler._loader
    if rank == 1:
        sampler._loader = Damaged(loader, bench.engine.llm)  # type: ignore[assignment]
    try:
        sampler.load_weights(policy.full_weights(), 2)
    except SamplerError as error:
        result["damaged"] = str(error)
    sampler._loader = loader
    sampler.load_weights(policy.full_weights(), 3)
    left_out = "layers.0.self_attn.k_proj.weight"
    try:
        sampler.load_weights(((n, v) for n, v in policy.full_weights() if rank == 0 or left_out not in n), 4)
    except SamplerError as error:
        result["dropped"] = str(error)
    return result


def adapters_on_one_of_two(rank: int, port: int, model: Path) -> dict[str, Any]:
    from rlcore.errors import SamplerError

    bench = _bench_of_two(rank, port, model, {"rank": 4, "alpha": 12.0, "vision_tower": False})
    sampler, policy = bench.sampler, bench.policy
    sampler.load_base(policy.full_weights())
    sampler.load_adapter(policy.adapter_weights(), 0)
    result: dict[str, Any] = {"greedy": bench.greedy(), "before": bench.delta()}
    bench.shake()
    result["stale"] = bench.delta()
    sampler.load_adapter(policy.adapter_weights(), 1)
    result |= {"after": bench.delta(), "version": bench.version()}
    result["held"] = sum(value.numel() for value in bench.engine.held_adapter())

    for wrong in ("up_proj", "o_proj"):  # split by rows, and by columns
        renamed = [(name.replace(wrong, f"{wrong}_"), value) for name, value in policy.adapter_weights()]
        try:
            sampler.load_adapter(renamed, 2)
        except SamplerError as error:
            result[wrong] = str(error)
    held = bench.engine.held_adapter

    def damaged() -> Any:
        first, *others = held()
        return [first + 1e-3, *others]

    if rank == 1:
        bench.engine.held_adapter = damaged  # type: ignore[method-assign]
    try:
        sampler.load_adapter(policy.adapter_weights(), 3)
    except SamplerError as error:
        result["damaged"] = str(error)
    return result


def alone_with_adapters(rank: int, port: int, model: Path) -> dict[str, Any]:
    bench = Bench(model, {"rank": 4, "alpha": 12.0, "vision_tower": False})
    bench.sampler.load_base(bench.policy.full_weights())
    bench.sampler.load_adapter(bench.policy.adapter_weights(), 0)
    return {"greedy": bench.greedy(), "held": sum(value.numel() for value in bench.engine.held_adapter())}


def alone(rank: int, port: int, model: Path) -> dict[str, Any]:
    bench = Bench(model, None)
    bench.sampler.load_weights(bench.policy.full_weights(), 0)
    return {"greedy": bench.greedy()}


def routes_of_two(rank: int, port: int, model: Path) -> dict[str, Any]:
    return _routes(_bench_of_two(rank, port, model, None, replay_routes=True))


def routes_alone(rank: int, port: int, model: Path) -> dict[str, Any]:
    return _routes(Bench(model, None, replay_routes=True))


def _routes(bench: Bench) -> dict[str, Any]:
    from rlcore.rollout.groups import in_order
    from rlcore.types import SampleRequest

    bench.sampler.load_weights(bench.policy.full_weights(), 0)
    groups = in_order(bench.sampler.generate([SampleRequest(p, 1, 0, greedy=True) for p in bench.problems]))
    routes = [group.completions[0].routes for group in groups]
    assert all(own is not None for own in routes)
    return {"routes": [own.tolist() for own in routes if own is not None]}


def _child(measure: Callable[[int, int, Path], Any], rank: int, port: int, model: Path, queue: Any) -> None:
    try:
        queue.put((rank, measure(rank, port, model)))
    except BaseException:  # noqa: BLE001 - handed to the test, which fails with it
        queue.put((rank, traceback.format_exc()))


Measure = Callable[[int, int, Path], dict[str, Any]]


def measured(model: Path, two: Measure = one_of_two, one: Measure = alone) -> list[dict[str, Any]]:
    """Of rank 0, of rank 1, and of an engine that one process holds."""
    port = reserved_port()
    queue = FORKED.Queue()
    measures = [two, two, one]
    children = [
        FORKED.Process(target=_child, args=(measure, rank, port, model, queue)) for rank, measure in enumerate(measures)
    ]
    for child in children:
        child.start()
    try:
        found = {}
        for _ in children:
            rank, found[rank] = queue.get(timeout=600)
            assert isinstance(found[rank], dict), found[rank]
    finally:
        for child in children:
            child.kill()  # an engine takes its time to shut down, and nothing is left to learn from it
            child.join()
    print(found)  # noqa: T201 - shown with -s: what was measured
    return [found[rank] for rank in range(len(children))]


def assert_in_step(model: Path) -> None:
    first, second, one = measured(model)
    assert first["greedy"] == second["greedy"] == one["greedy"]
    for rank in (first, second):
        assert rank["before"] < 1e-4  # sampled log-probs are those of the trainer
        assert rank["stale"] > 1e-2
        assert "elements of " in rank["dropped"]
        assert "k_proj.weight were taken by no rank" in rank["dropped"]
        assert rank["after"] < 1e-4
        assert rank["version"] == 1
        assert 0.5 < rank["share"] < 0.7  # norms are whole on both
    assert "damaged" not in first
    assert "not every weight arrived" in second["damaged"]


def test_two_ranks_draw_what_one_draws_with_pictures(tiny_model: Path) -> None:
    assert_in_step(tiny_model)


def test_two_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    create_tiny_policy(tmp_path, TinyModelConfig(task="sums", warm_start_steps=0))
    assert_in_step(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_two_ranks_draw_what_one_draws_with_experts(tmp_path: Path, family: str) -> None:
    from tests.checking import make_model

    assert_in_step(make_model(tmp_path / "model", family, num_key_value_heads=2))


def test_two_ranks_record_the_experts_that_one_records(tmp_path: Path) -> None:
    from tests.checking import make_model

    model = make_model(tmp_path / "model", "qwen3_moe", num_key_value_heads=2)
    first, second, one = measured(model, routes_of_two, routes_alone)
    assert first["routes"] == second["routes"] == one["routes"]


def test_two_ranks_hold_an_adapter_together(tiny_model: Path) -> None:
    first, second, one = measured(tiny_model, adapters_on_one_of_two, alone_with_adapters)
    assert first["greedy"] == second["greedy"] == one["greedy"]
    for rank in (first, second):
        assert rank["before"] < 1e-4
        assert rank["stale"] > 1e-2
        assert rank["after"] < 1e-4
        assert rank["version"] == 1
        assert 0.5 < rank["held"] / one["held"] < 0.9  # one of A and B is whole on both ranks
        assert "elements of " in rank["up_proj"]
        assert "elements of " in rank["o_proj"]
    assert "damaged" not in first
    assert "not every tensor arrived" in second["damaged"]


@pytest.fixture(scope="module")
def whole(tiny_model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two steps of a run whose two workers hold one sampler: its folder and its result."""
    folder = tmp_path_factory.mktemp("tensor-parallel") / "whole"
    return folder, run(folder, tiny_model, dataset, experiment(**TOGETHER), until=2, cut=1, through_ray=True)


def test_a_cut_run_equals_the_whole(
    whole: tuple[Path, dict[str, Any]], tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    folder, result = whole
    second = run(tmp_path / "second", tiny_model, dataset, experiment(**TOGETHER), until=2, resume=folder / "cut")
    assert second["tokens"] == tokens_after(1, result) != []
    assert result["weights_at_cut"] != result["weights"]
    assert second["weights"] == result["weights"]
    for record in journal(folder):
        assert record.metrics["rollout/abs_delta_logprob_mean"] < 1e-4
        assert record.metrics["optim/grad_norm"] > 0


def test_two_ranks_that_only_sample_draw_the_same(
    whole: tuple[Path, dict[str, Any]], tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    apart = experiment(**TOGETHER, **{"resources.rollout_workers": RANKS})
    first, (_, result) = run(tmp_path / "apart", tiny_model, dataset, apart, until=1), whole
    assert first["weights"] == result["weights_at_cut"]
    assert first["tokens"] + tokens_after(1, result) == result["tokens"]
