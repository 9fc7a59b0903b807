"""Rows that compare whole steps with those of verl and TRL, from ``accepted/*.json``."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.accepted import record
from tests.bench.rows import Row, medians, percent, reached, rounded, rounded_spread, spread


def against_peers() -> Iterator[Row]:
    yield from _against_verl()
    yield from _whole_steps()
    yield from _against_trl_pinned()


def _against_verl() -> Iterator[Row]:
    for name, regime, measure, goal in (
        ("verl-text-h200", "fixed", "whole step, text, fixed", 1.5),
        ("verl-text-h200", "ragged", "the same, ragged", 1.5),
        ("verl-vl-h200", "fixed", "whole step, VL-3B, 32 x 8, 431 + 512, a picture each", 2.0),
    ):
        sides = record(name)["regimes"][regime]
        ratio = sides["verl"]["seconds"]["median"] / sides["ours"]["seconds"]["median"]
        yield Row(
            f"{measure}: verl 0.9.1 / ours †",
            f"verl: {spread(sides['verl'])}",
            f"{spread(sides['ours'])}: {ratio:.2f} x",
            f"{goal} x",
            reached(ratio >= goal, see="14"),
        )
    sides = record("verl-vl-ragged-h200")["regimes"]["ragged"]
    peer, ours = (sides[side]["tokens_per_s"]["median"] for side in ("verl", "ours"))
    yield Row(
        "the same, ragged, by real tokens/s: ours / verl 0.9.1 ‡",
        f"verl: {rounded(peer)}, {sides['verl']['mean_length']['median']:.0f} tokens in a completion",
        f"{rounded(ours)}, {sides['ours']['completion']['median'] / sides['ours']['rollouts']['median']:.0f} tokens: "
        f"{ours / peer:.2f} x",
        "2.0 x",
        "see 14",
    )


def _whole_steps() -> Iterator[Row]:
    text, vl = record("step-text-h200"), record("step-vl-h200")
    trl = record("trl-h200")["results"]
    ours, peer = (medians(text["regimes"]["fixed"][side]) for side in ("ours", "peer"))
    day = trl["text"]["fixed"]
    both = f"{peer['seconds']:.1f} s right before ours, {day['seconds']:.1f} s on another day"
    ratios = [other["seconds"] / ours["seconds"] for other in (peer, day)]
    yield Row(
        "whole step, text, fixed, 32 x 8, 256 + 1,024",
        both,
        f"{ours['seconds']:.2f} s: {ratios[0]:.2f} x, {ratios[1]:.2f} x",
        "1.5 x",
        reached(min(ratios) >= 1.5),
    )
    alike = medians(text["ours with the peer's engine settings"]["fixed"])
    ratios = [other["seconds"] / alike["seconds"] for other in (peer, day)]
    yield Row(
        "the same, our engine with TRL's settings *",
        "the same",
        f"{alike['seconds']:.2f} s: {ratios[0]:.2f} x, {ratios[1]:.2f} x",
        "1.5 x",
        reached(*(ratio >= 1.5 for ratio in ratios), see="13"),
    )
    own, other = (medians(text["regimes"]["ragged"][side])["tokens_per_s"] for side in ("ours", "peer"))
    another = trl["text"]["ragged"]["tokens_per_s"]
    yield Row(
        "text, ragged, by real tokens/s",
        f"{rounded(other)} right before ours, {rounded(another)} on another day",
        f"{rounded(own, 4)}: {own / other:.1f} x, {own / another:.1f} x",
        "2.3 x",
        reached(own / other >= 2.3, own / another >= 2.3),
    )
    fixed, peer_vl = (medians(vl["regimes"]["fixed"][side]) for side in ("ours", "peer"))
    ratios = [trl["vl"]["fixed"]["seconds"] / fixed["seconds"], peer_vl["seconds"] / fixed["seconds"]]
    yield Row(
        "whole step, VL-3B, 32 x 8, 431 + 512, a picture each",
        f"{trl['vl']['fixed']['seconds']:.1f} s; {peer_vl['seconds']:.1f} s on a slower machine",
        f"{fixed['seconds']:.2f} s: {ratios[0]:.1f} x, {ratios[1]:.1f} x",
        "4.5 x",
        reached(min(ratios) >= 4.5),
    )
    mfu = [medians(text["regimes"][regime]["ours"])["update_mfu_shared_once"] for regime in ("fixed", "ragged")]
    theirs = [medians(text["regimes"][regime]["peer"])["update_mfu"] for regime in ("fixed", "ragged")]
    yield Row(
        "update MFU in these steps, text, fixed / ragged",
        " / ".join(map(percent, theirs)),
        " / ".join(map(percent, mfu)),
        "45 %",
        reached(*(value >= 0.45 for value in mfu)),
    )
    value = fixed["update_mfu_shared_once"]
    yield Row(
        "update MFU in these steps, VL, fixed",
        percent(trl["vl"]["fixed"]["update_mfu"]),
        percent(value),
        "38 %",
        reached(value >= 0.38),
    )
    ragged = medians(vl["regimes"]["ragged"]["ours"])
    value, mean = ragged["update_mfu_shared_once"], ragged["completion"] / ragged["rollouts"]
    yield Row(
        f"the same, ragged (mean {mean:.0f}): {ragged['seconds']:.2f} s a step *",
        "",
        percent(value),
        "38 %",
        reached(value >= 0.38, see="1"),
    )
    value = record("update-h200")["results"]["text-7b"]["kept_bf16_32"]["fixed"]["mfu"]
    yield Row("update MFU, 7B text, fixed, 32 x 8 *", "", percent(value), "50 %", reached(value >= 0.5, see="2"))
    compiling, warm = (step["tokens_per_s"] for step in record("step-geometry3k-h200")["steps"] if step["counted"])
    yield Row(
        "VL-3B on Geometry3K, own lengths, real tokens/s",
        "",
        f"{rounded(warm)} warm, {rounded(compiling)} while it compiles",
        "",
        "see 3",
    )
    speed = record("step-geometry3k-7b-h200")["regimes"]["ragged"]["tokens_per_s"]
    yield Row("VL-7B on Geometry3K, real tokens/s *", "", rounded_spread(speed), "", "see 3")


def _against_trl_pinned() -> Iterator[Row]:
    """TRL's steps with the pinned versions."""
    regimes, see = record("trl-pinned-h200")["regimes"], "22"
    fixed, ratio = regimes["text"]["fixed"], regimes["text"]["fixed"]["step time, peer / ours"]
    yield Row(
        "whole step, text, fixed: TRL 1.16 / ours ‡",
        spread(fixed["peer"]),
        f"{spread(fixed['ours'])}: {ratio:.2f} x",
        "3.0 x",
        reached(ratio >= 3, see=see),
    )
    ragged, ratio = regimes["text"]["ragged"], regimes["text"]["ragged"]["real tokens/s, ours / peer"]
    peer, ours = (rounded(ragged[side]["tokens_per_s"]["median"]) for side in ("peer", "ours"))
    yield Row(
        "the same, ragged, by real tokens/s ‡",
        f"{peer} in one step",
        f"{ours}: {ratio:.2f} x",
        "5.0 x",
        reached(ratio >= 5, see=see),
    )
    pictures = regimes["vl"]["fixed"]["peer"]["seconds"]["median"]
    own = record("verl-vl-h200")["regimes"]["fixed"]["ours"]["seconds"]["median"]
    yield Row(
        "whole step, VL-3B, fixed: TRL 1.16 ‡ / ours †",
        f"{pictures:.1f} s in one step",
        f"{own:.2f} s on another day: {pictures / own:.1f} x",
        "8.0 x",
        f"see {see}",
    )
