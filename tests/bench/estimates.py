"""The estimates of ``rlcore.estimate`` next to what was measured on an H200, for docs/cost.md and its test.

The constants were fitted to the rows that say so, those of sampling to older measurements with vLLM 0.26. The other
rows were measured later, so they show how far off an estimate of another shape is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from rlcore.config import ModelConfig
from rlcore.estimate import BANDWIDTH, GIB, Architecture, Plan, estimate_memory, estimate_seconds
from rlcore.flops import PEAK_BF16
from rlcore.jobs.architecture import architecture
from tests.bench.accepted import record
from tests.bench.tables import markdown
from tests.bench.update import SHAPES, build_model

DEVICE = "H200"
PEAK, BYTES = PEAK_BF16[DEVICE], BANDWIDTH[DEVICE]

Quantity = Literal["peak", "update", "sampling"]


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    quantity: Quantity
    kind: str  # a key of models()
    plan: Plan
    measured: float  # GiB of a peak, seconds otherwise
    within: float  # how far off the estimate may be, as a share of what was measured
    fitted: bool

    def estimated(self) -> float:
        model = models()[self.kind]
        if self.quantity == "peak":
            return estimate_memory(model, self.plan).training / GIB
        seconds = estimate_seconds(model, self.plan, PEAK, BYTES)
        return seconds.update if self.quantity == "update" else seconds.generate


@cache
def models() -> dict[str, Architecture]:
    def shape(kind: str, config: ModelConfig) -> Architecture:
        return architecture(build_model(kind, False, torch.device("meta"), torch.float32), config)

    return {kind: shape(kind, ModelConfig()) for kind in SHAPES} | {
        "vl, frozen tower": shape("vl", ModelConfig(freeze_vision_tower=True))
    }


def plan_of(kind: str, *, problems: int, prompt: float, completion: float, **others: Any) -> Plan:
    """One device that trains and samples, with every activation kept and blocks compiled."""
    shape = SHAPES[kind]
    plain = Plan(
        workers=1, rollout_workers=0, engine_workers=1, group_size=8, problems=problems, passes=1,
        prompt_tokens=prompt, completion_tokens=completion, longest=shape.prompt + shape.cap,
        image_size=(shape.side, shape.side) if shape.side else None, tokens_per_microbatch=17_408,
        checkpointing="none", compiled=True, bf16_optimizer=False, reshard=False, offload=False, adapters=False,
        sleeps=True, reference=False, old_logprobs=0.0, sampler_share=0.5, max_sequences=1024, in_flight=1.0,
        overlapped=False, device=DEVICE,
    )  # fmt: skip
    return replace(plain, **others)


def update_plan(kind: str, variant: str, regime: str, **others: Any) -> Plan:
    """Of an update that ``accepted/update-h200.json`` holds."""
    measured = record("update-h200")["results"][kind][variant]
    sizes = measured[regime]
    return plan_of(
        kind,
        problems=measured["problems"],
        prompt=SHAPES[kind].prompt,
        completion=sizes["mean_completion"],
        tokens_per_microbatch=round(sizes["computed_tokens"] / sizes["microbatches"]),
        **others,
    )


def rows() -> Iterator[Row]:
    updates = record("update-h200")["results"]
    bf16 = {"checkpointing": "selective", "bf16_optimizer": True}

    def peak(label: str, kind: str, variant: str, *, fitted: bool, model: str | None = None, **others: Any) -> Row:
        plan, gib = update_plan(kind, variant, "fixed", **others), updates[kind][variant]["fixed"]["peak_gib"]
        return Row(label, "peak", model or kind, plan, gib, 0.10, fitted)

    yield peak("peak of an update, text 1.5B, activations kept", "text", "kept_16", fitted=True)
    yield peak("blocks computed again", "text", "compiled", fitted=True, checkpointing="full")
    yield peak("kept, not compiled", "text", "kept_eager", fitted=True, compiled=False)
    yield peak("VL-3B, kept", "vl", "kept_8", fitted=True)
    yield peak("VL-3B, kept, not compiled", "vl", "kept_eager", fitted=True, compiled=False)
    yield peak("text 7B, `adamw_bf16`, `selective`", "text-7b", "selective_bf16", fitted=True, **bf16)
    yield peak("VL-3B, frozen tower", "vl", "frozen", fitted=False, model="vl, frozen tower")
    offload: dict[str, Any] = {"checkpointing": "full", "offload": True}
    yield peak("VL-3B, `training.offload`, blocks computed again", "vl", "offload", fitted=False, **offload)
    kept_7b: dict[str, Any] = {"bf16_optimizer": True, "reshard": True}
    yield peak("text 7B, `adamw_bf16`, kept", "text-7b", "kept_bf16_32", fitted=False, **kept_7b)

    def update(
        label: str, kind: str, variant: str, regime: str, within: float, *, fitted: bool, model: str | None = None,
        **others: Any,
    ) -> Row:  # fmt: skip
        plan, seconds = update_plan(kind, variant, regime, **others), updates[kind][variant][regime]["seconds"]
        return Row(f"{label}, {regime}", "update", model or kind, plan, seconds, within, fitted)

    yield update("update, text, 16 problems", "text", "kept_16", "fixed", 0.05, fitted=True)
    yield update("update, text, 16 problems", "text", "kept_16", "ragged", 0.15, fitted=True)
    yield update("update, text, computed again", "text", "compiled", "fixed", 0.05, fitted=True, checkpointing="full")
    yield update("update, text, computed again", "text", "compiled", "ragged", 0.15, fitted=True, checkpointing="full")
    yield update("update, VL, 8 problems", "vl", "kept_8", "fixed", 0.05, fitted=True)
    yield update("update, VL, 8 problems", "vl", "kept_8", "ragged", 0.15, fitted=True)
    yield update("update, text 7B, `selective`", "text-7b", "selective_bf16", "fixed", 0.05, fitted=True, **bf16)
    for kind, label in (("text", "text"), ("vl", "VL")):
        yield update(f"update, {label}, 32 problems", kind, "kept", "fixed", 0.10, fitted=False)
        yield update(f"update, {label}, 32 problems", kind, "kept", "ragged", 0.10, fitted=False)
    frozen = {"fitted": False, "model": "vl, frozen tower"}
    yield update("update, VL, frozen tower", "vl", "frozen", "fixed", 0.10, **frozen)
    yield update("update, VL, frozen tower", "vl", "frozen", "ragged", 0.10, **frozen)
    yield update("update, VL, `training.offload`", "vl", "offload", "fixed", 0.10, fitted=False, **offload)
    yield update("update, text 7B, kept", "text-7b", "kept_bf16_32", "fixed", 0.15, fitted=False, **kept_7b)

    def sampling(
        label: str,
        kind: str,
        sizes: tuple[int, int, int],
        seconds: float,
        within: float,
        *,
        fitted: bool,
        **others: Any,
    ) -> Row:  # fmt: skip
        problems, prompt, completion = sizes
        group = others.get("group_size", 8)
        plan = plan_of(kind, problems=problems, prompt=prompt, completion=completion, **others)
        shape = f"{problems * group:,} x ({prompt} + {completion:,})"
        return Row(f"sampling, {label}, {shape}", "sampling", kind, plan, seconds, within, fitted)

    text = record("rollout-text-h200")["by_steps_per_call"][0]["seconds"]
    yield sampling("text", "text", (128, 256, 512), text, 1 / 6, fitted=False)
    step = record("step-text-h200")["regimes"]["fixed"]["ours"]["generate"]["median"]
    yield sampling("text in a step", "text", (32, 256, 1024), step, 1 / 6, fitted=False)
    vl = record("rollout-vl-h200")
    yield sampling(
        "VL", "vl", (32, SHAPES["vl"].prompt, 512), vl["by_steps_per_call"][0]["seconds"], 0.20, fitted=False
    )
    step = record("step-vl-h200")["regimes"]["fixed"]["ours"]["generate"]["median"]
    yield sampling("VL in a step", "vl", (32, SHAPES["vl"].prompt, 512), step, 0.20, fitted=False)
    placed = record("placement-h200x4")["placements"]
    four, apart = (placed[name]["seconds"]["generate"] for name in ("colocated", "apart"))
    yield sampling("text on four GPUs", "text", (60, 256, 1024), four, 0.20, fitted=False, workers=4)
    one_of_four = {"workers": 3, "rollout_workers": 1}
    yield sampling("text on one of four", "text", (60, 256, 1024), apart, 0.20, fitted=False, **one_of_four)
    growth = record("growth-h200")
    for point in growth["by group size"]:
        group, seconds = point["group"], point["generate"]
        within = 0.20 if 8 * group >= 128 else 0.40
        yield sampling("text", "text", (8, 256, 1024), seconds, within, fitted=False, group_size=group)
    for point in growth["by cap"]:
        if point["cap"] != 1024:
            within = 0.15 if point["cap"] >= 4096 else 0.40
            yield sampling("text", "text", (8, 256, point["cap"]), point["generate"], within, fitted=False)


def table() -> str:
    """Of docs/cost.md."""
    lines = []
    for row in rows():
        unit, digits = ("GiB", 1) if row.quantity == "peak" else ("s", 2)
        both = [f"{value:.{digits}f} {unit}" for value in (row.estimated(), row.measured)]
        off = f"{round(100 * (row.estimated() / row.measured - 1)):+d} %"
        lines.append((row.label, *both, off, "fitted" if row.fitted else ""))
    return markdown(("", "estimated", "measured", "off by", ""), lines)
