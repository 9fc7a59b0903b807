"""Rows that compare whole steps with those of verl and TRL, from ``accepted/*.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.accepted import record
from tests.bench.rows import Row, percent, reached, rounded, rounded_spread, spread


def against_peers() -> Iterator[Row]:
    yield from _against_verl()
    yield from _against_trl()
    yield from _mfu()
    yield from _geometry3k()
    yield from _on_cpu()


def _by_seconds(
    measure: str, name: str, peer: Mapping[str, Any], ours: Mapping[str, Any], goal: float, *, see: str
) -> Row:
    """How many times as long a step of this peer takes as one of ours."""
    ratio = peer["seconds"]["median"] / ours["seconds"]["median"]
    verdict = reached(ratio >= goal, see=see)
    return Row(measure, f"{name}: {spread(peer)}", f"{spread(ours)}: {ratio:.2f} x", f"{goal} x", verdict)


def _by_tokens(
    measure: str, name: str, peer: Mapping[str, Any], ours: Mapping[str, Any], goal: float, *, see: str
) -> Row:
    """How many times as many real tokens per second our steps compute as this peer's."""
    theirs, own = peer["tokens_per_s"], ours["tokens_per_s"]
    ratio = own["median"] / theirs["median"]
    cells = f"{name}: {rounded_spread(theirs)}", f"{rounded_spread(own)}: {ratio:.2f} x"
    return Row(measure, *cells, f"{goal} x", reached(ratio >= goal, see=see))


def _against_verl() -> Iterator[Row]:
    for name, regime, measure, goal in (
        ("verl-text-h200", "fixed", "whole step, text, 32 x 8, 256 + 1,024, fixed: verl 0.9.1 / ours *", 1.5),
        ("verl-text-ragged-h200", "ragged", "the same, ragged: verl 0.9.1 / ours", 1.5),
        ("verl-vl-h200", "fixed", "whole step, VL-3B, 32 x 8, 431 + 512, a picture each: verl 0.9.1 / ours", 2.0),
    ):
        sides = record(name)["regimes"][regime]
        yield _by_seconds(measure, "verl", sides["verl"], sides["ours"], goal, see="14")
    sides = record("verl-vl-ragged-h200")["regimes"]["ragged"]
    measure = "the same, ragged, by real tokens/s: ours / verl 0.9.1"
    yield _by_tokens(measure, "verl", sides["verl"], sides["ours"], 2.0, see="14")


def _against_trl() -> Iterator[Row]:
    text, vl = (record(f"step-{kind}-h200")["regimes"] for kind in ("text", "vl"))
    for sides, measure, goal in (
        (text["fixed"], "whole step, text, fixed: TRL 1.16 / ours", 3.0),
        (vl["fixed"], "whole step, VL-3B, fixed: TRL 1.16 / ours", 8.0),
    ):
        yield _by_seconds(measure, "TRL", sides["peer"], sides["ours"], goal, see="22")
    measure = "whole step, text, ragged, by real tokens/s: ours / TRL 1.16"
    yield _by_tokens(measure, "TRL", text["ragged"]["peer"], text["ragged"]["ours"], 5.0, see="22")


def _on_cpu() -> Iterator[Row]:
    found = record("step-cpu")
    for name, measure, row in (
        ("text_fixed", "CPU, whole step through Ray, tiny text, fixed: TRL 1.16 / ours", _by_seconds),
        ("text_ragged", "the same, ragged, by real tokens/s: ours / TRL 1.16", _by_tokens),
        ("vl_fixed", "CPU, whole step through Ray, tiny VL, fixed: TRL 1.16 / ours", _by_seconds),
    ):
        sides = found[name]["medians"]
        yield row(measure, "TRL", sides["peer"], sides["ours"], 1.5, see="12")


def _mfu() -> Iterator[Row]:
    text = record("step-text-h200")["regimes"]
    own = [text[regime]["ours"]["update_mfu_shared_once"]["median"] for regime in ("fixed", "ragged")]
    peer = [text[regime]["peer"]["update_mfu"]["median"] for regime in ("fixed", "ragged")]
    updates = record("update-h200")["results"]
    vl = [updates["vl"]["kept"][regime]["mfu"] for regime in ("fixed", "ragged")]
    pictures = record("step-vl-h200")["regimes"]["fixed"]["peer"]["update_mfu"]["median"]
    for measure, others, values, goals, see in (
        ("update MFU in these steps, text, fixed / ragged", peer, own, (0.5, 0.5), "15"),
        ("update MFU, VL-3B, fixed / ragged", [pictures], vl, (0.47, 0.45), "1"),
        ("update MFU, 7B text, fixed", [], [updates["text-7b"]["kept_bf16"]["fixed"]["mfu"]], (0.56,), "2"),
    ):
        wanted = " / ".join(dict.fromkeys(f"{100 * goal:.0f} %" for goal in goals))
        met = [value >= goal for value, goal in zip(values, goals, strict=True)]
        trl = "TRL: " + " / ".join(map(percent, others)) if others else ""
        yield Row(measure, trl, " / ".join(map(percent, values)), wanted, reached(*met, see=see))


def _geometry3k() -> Iterator[Row]:
    compiling, warm = (step["tokens_per_s"] for step in record("step-geometry3k-h200")["steps"] if step["counted"])
    yield Row(
        "VL-3B on Geometry3K, own lengths, real tokens/s *",
        "",
        f"{rounded(warm)} warm, {rounded(compiling)} while it compiles",
        "",
        "see 3",
    )
    speed = record("step-geometry3k-7b-h200")["regimes"]["ragged"]["tokens_per_s"]
    verdict = reached(speed["median"] >= 9_000, see="3")
    yield Row("VL-7B on Geometry3K, 90 x 5, real tokens/s", "", rounded_spread(speed), "9,000", verdict)
