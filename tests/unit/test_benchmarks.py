"""The benchmarks: the guard's verdicts by hand-made figures, and the programs that start no engine."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.data.tiny import END_OF_TURN, SPECIAL_TOKENS
from rlcore.segment.journal import MetricJournal
from tests.bench import tiny
from tests.bench.cases import (
    TINY_SHAPES,
    build_tokenizer,
    prompts_of,
    random_case,
    stop_chance,
    trl_flops,
    vision_tokens,
)
from tests.bench.guard import (
    DEVICE,
    MAIN_ROWS,
    TRL,
    Ratio,
    accepted_outputs,
    accepted_ratios,
    exit_status,
    judge,
    measured_ratios,
    other_speeds,
    table,
)
from tests.bench.tables import PAGES, with_tables

ELSEWHERE = "NVIDIA H100"


def ratio(value: float, device: str = DEVICE, *, recorded: bool = False) -> Ratio:
    return Ratio(value, device, TRL, recorded)


@pytest.mark.parametrize(
    ("accepted", "measured", "failed"),
    [
        (2.0, 2.0, False),
        (2.0, 3.5, False),
        (2.0, 1.8, False),  # 10 % below is still allowed
        (1.1, 0.99, False),  # the same, where floats make it 10.000000000000009 %
        (2.0, 1.79, True),
        (2.0, 0.5, True),
        (2.0, 0.0, True),
        (2.0, math.nan, True),
        (2.0, math.inf, True),
    ],
)
def test_a_ratio_may_fall_by_a_tenth(accepted: float, measured: float, failed: bool) -> None:
    (verdict,) = judge({"row": ratio(accepted)}, {"row": ratio(measured)})
    assert verdict.failed is failed
    assert exit_status([verdict], tiny=False) == int(failed)
    assert ("FAILED" in table([verdict])) is failed


def test_the_change_is_that_of_the_ratio() -> None:
    (verdict,) = judge({"row": ratio(2.0)}, {"row": ratio(1.5)})
    assert verdict.change == pytest.approx(-0.25)
    assert table([verdict]).splitlines()[-1] == "| row | TRL | 2.00 | 1.50 | -25.0% | FAILED: more than 10% below |"


def test_a_row_that_was_not_measured_fails() -> None:
    verdicts = judge({"a": ratio(2.0), "b": ratio(2.0)}, {"a": ratio(2.0)})
    assert [(v.row, v.failed, v.text) for v in verdicts] == [("a", False, "holds"), ("b", True, "FAILED: not measured")]
    assert exit_status(verdicts, tiny=False) == 1
    assert exit_status(verdicts, tiny=True) == 1


def test_a_row_that_nobody_accepted_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no accepted ratio for \['new'\]; there are \['row'\]"):
        judge({"row": ratio(2.0)}, {"row": ratio(2.0), "new": ratio(1.0)})


def test_a_record_of_another_device_is_not_compared() -> None:
    verdicts = judge({"row": ratio(2.0, recorded=True)}, {"row": ratio(0.1, ELSEWHERE, recorded=True)})
    assert not verdicts[0].failed
    assert not verdicts[0].compared
    assert verdicts[0].text == "not compared: the record is of NVIDIA H200, this is NVIDIA H100"
    assert exit_status(verdicts, tiny=False) == 1, "a run that compares nothing guards nothing"
    assert exit_status(verdicts, tiny=True) == 0


def test_two_sides_that_both_ran_on_another_device_are_compared_and_marked() -> None:
    held, fell = (judge({"row": ratio(2.0)}, {"row": ratio(value, ELSEWHERE)})[0] for value in (1.9, 1.7))
    assert held.compared
    assert held.text == "holds (accepted on NVIDIA H200)"
    assert fell.failed


def test_the_records_hold_against_themselves() -> None:
    """Every main row has an accepted ratio, and it is the one that performance.md shows."""
    outputs = accepted_outputs()
    shown = {
        "whole step, text, fixed": 3.12,
        "whole step, text, ragged, real tokens/s": 3.92,
        "sampling, text": 2.09,
        "sampling, VL-3B": 1.43,
    }
    for outputs_now in (outputs, _ours_alone(outputs)):
        accepted = accepted_ratios(other_speeds(outputs_now))
        assert accepted.keys() == MAIN_ROWS.keys()
        assert {row: round(accepted[row].value, 2) for row in shown} == shown
        verdicts = judge(accepted, measured_ratios(outputs_now, DEVICE))
        assert [v.row for v in verdicts if v.failed or not v.compared] == []
        slower = judge(accepted, measured_ratios(_slower(outputs_now), DEVICE))
        assert [v.row for v in slower if not v.failed] == []
        tiny_run = judge(accepted, measured_ratios(_slower(outputs_now), "tiny models", tiny=True))
        assert [v.row for v in tiny_run if v.failed or v.compared] == []
        assert exit_status(tiny_run, tiny=True) == 0


def _ours_alone(outputs: dict[str, object]) -> dict[str, object]:
    """As runs without TRL write them."""
    alone = {
        name: {"side": "ours", "regimes": {regime: sides["ours"] for regime, sides in outputs[name]["regimes"].items()}}
        for name in ("step-text", "step-vl")
    }
    return outputs | alone


def _slower(outputs: dict[str, object]) -> dict[str, object]:
    """Ours at half the speed, the others as they were."""
    changed = json.loads(json.dumps(outputs))
    for name in ("step-text", "step-vl"):
        for sides in changed[name]["regimes"].values():
            ours = sides.get("ours", sides)
            ours["seconds"]["median"] *= 3
            ours["tokens_per_s"]["median"] /= 3
    for kind in ("text", "vl"):
        for regime in changed[f"update-{kind}"]["results"][kind]["kept"].values():
            if isinstance(regime, dict) and "seconds" in regime:
                regime["seconds"] *= 2
        changed[f"rollout-{kind}"]["sync"]["median"] *= 2
        for run in changed[f"rollout-{kind}"]["by_steps_per_call"]:
            run["tokens_per_s"] /= 2
    return changed


def test_without_a_gpu_the_guard_says_what_it_needs(tmp_path: Path) -> None:
    code = (
        "import torch, sys; torch.cuda.is_available = lambda: False; "
        "from tests.bench import guard; sys.argv = ['guard', '--folder', sys.argv[1]]; sys.exit(guard.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tiny.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs an NVIDIA GPU" in done.stderr
    assert "no CUDA device" in done.stderr
    assert "tests.bench.guard --tiny" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["text", "vl"])
def test_a_prompt_has_the_tokens_that_were_asked_for(kind: str, tmp_path: Path) -> None:
    shape = TINY_SHAPES[kind]
    case = random_case(kind, tmp_path, problems=3, prompt_tokens=shape.prompt, side=shape.side, tiny=True)
    prompts = prompts_of(case)
    assert [len(prompts.tokens(problem)) for problem in case.problems] == [shape.prompt] * 3
    assert len({problem.question for problem in case.problems}) == 3
    assert case.end_of_turn == prompts.tokenizer.eos_token_id
    with pytest.raises(ValueError, match="no room for text"):
        random_case(kind, tmp_path, problems=1, prompt_tokens=0, side=shape.side, tiny=True)


def test_the_tokenizer_has_qwen_s_special_tokens_in_their_places() -> None:
    tokenizer = build_tokenizer(tiny=False)
    assert len(tokenizer) == 151_936
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN) == 151_645
    assert vision_tokens(tiny=False) == (151_652, 151_653, 151_655, 151_656)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(151_643, 151_657))
    assert tokenizer.decode([151_700, 64, 65]) == "word151700ab"


def test_lengths_of_a_ragged_regime_have_the_mean_that_was_asked_for() -> None:
    chance = stop_chance(512, 1024)
    lengths = sum((1 - chance) ** n for n in range(1024))  # E[min(Geometric(p), cap)] is the sum of P(length > n)
    assert lengths == pytest.approx(512, rel=1e-6)


def test_trl_s_count_of_work_by_hand() -> None:
    from torch import nn
    from transformers import Qwen2Config

    class Model(nn.Linear):  # 12 parameters
        config = Qwen2Config(num_hidden_layers=2, hidden_size=5)

    count = trl_flops(Model(3, 4, bias=False), 0)
    assert count({"prompt": 10, "completion": 20, "sum_sq": 7, "rollouts": 1}) == 6 * 12 * 30 + 6 * 2 * 5 * 7


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """With what the programs that draw and write pages read."""
    for page in PAGES:
        shutil.copy(page, tmp_path)
    run = tmp_path / "run"
    (run / "report").mkdir(parents=True)
    journal = MetricJournal(run / "journal.jsonl")
    for step in range(1, 13):
        journal.step(step, {"reward/accuracy": step / 12})
    (run / "spec.json").write_text(json.dumps({"experiment": {"seed": 3}}))
    before = {"step": 0, "accuracy": 0.4, "accuracy_low": 0.3, "accuracy_high": 0.5}
    (run / "report" / "evaluations.json").write_text(json.dumps([before, before | {"step": 12, "accuracy": 0.45}]))
    return tmp_path


@pytest.mark.parametrize("name", [name for name, program in tiny.PROGRAMS.items() if not program.long])
def test_a_program_that_starts_no_engine_runs_to_its_end(name: str, out: Path) -> None:
    printed = tiny.run(name, out)
    if tiny.PROGRAMS[name].positive:
        tiny.check_figures(name, tiny.last_json(printed))
    pictures = {"demo_curves": 1, "plots": 4}
    assert len([path for path in out.glob("*.png") if path.stat().st_size > 10_000]) == pictures.get(name, 0)
    for page in PAGES:
        assert (out / page.name).read_text() == page.read_text()


def test_a_figure_that_is_missing_or_no_number_is_found() -> None:
    good = {"rows": [{"step": 0.1, "update": 2, "tokens_per_s": [3.0]}], "ok": True}
    tiny.check_figures("placement", good)
    for bad in ({"step": 1.0}, good | {"step": math.nan}, good | {"update": {"median": 0.0}}):
        with pytest.raises(AssertionError):
            tiny.check_figures("placement", bad)
    assert tiny.last_json('{"step": 1}\nlog\n{"a": 2}\n') == {"a": 2}
    assert tiny.last_json('{"step": 1}\n{\n "a": {\n  "b": 2\n }\n}\n') == {"a": {"b": 2}}


def test_tables_are_made_only_between_their_comments() -> None:
    assert with_tables("no table | here | 1.00") == "no table | here | 1.00"
