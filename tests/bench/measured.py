"""The rows of the table "measured" of docs/performance.md, from ``accepted/*.json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from tests.bench.accepted import record
from tests.bench.against_peers import against_peers
from tests.bench.rows import Row, percent, reached, rounded

_NUMBERS = {2: "two", 4: "four"}


def performance() -> Iterator[Row]:
    yield from against_peers()
    yield from _sampler()
    yield from _several_gpus()
    yield from _large()
    yield from _starts()
    yield from _newer()
    yield from _memory()
    yield from _growth()
    yield from _variants()


def _sampler() -> Iterator[Row]:
    text, vl = (record(f"rollout-{kind}-h200") for kind in ("text", "vl"))
    for run, measure, goal in (
        (text, "sampling, text, 1,024 x (256 + 512), tokens/s", 100_000.0),
        (vl, "sampling, VL-3B, 256 x (431 + 512), a picture each, tokens/s", None),
        (record("rollout-vl-h100"), "the same on an H100", None),
    ):
        own, best = run["vllm_own_loop"]["tokens_per_s"], max(row["tokens_per_s"] for row in run["by_steps_per_call"])
        yield Row(
            measure,
            f"{rounded(own)} (vLLM's own loop, our settings)",
            f"{rounded(best)}: {best / own:.2f} x",
            "2 x" if goal is None else rounded(goal),
            reached(best >= (goal or 2 * own), see="4"),
        )
    records = {kind: record(f"step-{kind}-h200") for kind in ("text", "vl")}
    steps = {kind: made["regimes"]["fixed"] for kind, made in records.items()}
    for kind, run, measure, goal in (
        ("text", text, "weight sync, text, alone / in a step", None),
        ("vl", vl, "weight sync, VL-3B, alone / in a step", 0.07),
    ):
        peer = steps[kind]["peer"]["sync_weights"]["median"]
        seconds = [run["sync"]["median"], steps[kind]["ours"]["weight_sync"]["median"]]
        yield Row(
            measure,
            f"{peer:.2f} s (TRL, in a step)",
            " / ".join(f"{value:.3f} s" for value in seconds),
            "no slower" if goal is None else f"{goal} s",
            reached(*(value <= (goal or peer) for value in seconds), see="5"),
        )
    for run, measure in ((text, "one sleep and one wake, text"), (vl, "one sleep and one wake, VL-3B")):
        both = [slept + woken for slept, woken in zip(run["sleep"], run["wake"], strict=True)]
        seconds = f"{min(both):.2f} to {max(both):.2f} s"
        yield Row(measure, "", seconds, "0.6 s", reached(max(both) <= 0.6, see="5"))
    ours = [sides["ours"]["abs_delta_logprob_mean"]["median"] for sides in steps.values()]
    differences = "the peer's difference of log-probs, sampler and trainer"
    peers = [statistics.median(made[differences]) for made in records.values()]
    yield Row(
        "mean difference of log-probs, sampler and trainer, text / VL",
        f"TRL: {' / '.join(f'{value:.3f}' for value in peers)}",
        " / ".join(f"{value:.3f}" for value in ours),
        "0.01",
        reached(*(value <= 0.01 for value in ours), see="6"),
    )


def _large() -> Iterator[Row]:
    """Policies that take several GPUs."""
    recipe = record("recipe-vl-7b-h200x4")
    (warm,) = (batch["metrics"] for batch in recipe["batches"] if batch["step"] == 8)
    speed = warm["system/tokens_per_second"] / recipe["workers"]
    yield Row(
        "VL-7B, all weights, the recipe `grpo-geo3k` on four GPUs, real tokens/s of each",
        "2,000, published by EasyR1 for eight H100s",
        f"{rounded(speed)}: {speed / 2_000:.1f} x",
        "",
        "see 16",
    )
    for file, policy, gpus, goal in (
        ("large-vl-32b-h200x2", "VL-32B, LoRA", 2, 120),
        ("large-vl-32b-h200x4", "VL-32B, LoRA", 4, None),
        ("large-vl-32b-full-h200x4", "VL-32B, all weights", 4, None),
        ("large-vl-72b-h200x4", "VL-72B, LoRA", 4, None),
    ):
        stages = record(file)["stages"]
        seconds = {stage["name"]: stage["seconds"] for stage in stages}
        of_gpu, host = (max(stage[key] or 0 for stage in stages) for key in ("gpu_gib", "processes_gib"))
        last = f"; step 2: {seconds['step 2']:.1f} s" if "step 2" in seconds else ""
        yield Row(
            f"{policy}, one engine on {_NUMBERS[gpus]} GPUs: until engines and policy are ready; memory",
            "",
            f"{seconds['start engines and load the policy']:.0f} s; {of_gpu / gpus:.0f} GiB of each GPU, "
            f"{host:.0f} GiB of the host{last}",
            f"host: {goal} GiB" if goal else "",
            reached(host <= goal, see="17") if goal else "see 17",
        )


def _starts() -> Iterator[Row]:
    flows = [record(name)["seconds"] for name in ("flow-text-1.5b-h200", "flow-vl-3b-h200")]
    first, next_one = "start to first step done", "the next trainer's start to step 3 done"
    for measure, key, goals in (
        ("trainer start to the end of step 1, text 1.5B / VL-3B with LoRA", first, (45, 60)),
        ("the same after a kill, to the end of its first step", next_one, (25, 35)),
    ):
        seconds = [flow[key] for flow in flows]
        met = [value <= goal for value, goal in zip(seconds, goals, strict=True)]
        yield Row(
            measure,
            "",
            " / ".join(f"{value:.1f} s" for value in seconds),
            " / ".join(f"{goal} s" for goal in goals),
            reached(*met, see="21"),
        )


def _newer() -> Iterator[Row]:
    """Exact log-probs, 8-bit sampling, newer families."""
    exact = record("exact-h100")
    with_it, without = ([step["seconds"] for step in exact[side] if step["counted"]] for side in ("exact", "default"))
    apart = [max(step["abs_delta_logprob_max"] for step in exact[side]) for side in ("exact", "default")]
    yield Row(
        "`rollout.exact`, text 1.5B, fixed: largest difference of log-probs, sampler and trainer; whole step, one H100",
        f"{apart[1]:.3f}; {statistics.median(without):.1f} s",
        f"{apart[0]:.1f}; {statistics.median(with_it):.1f} s: "
        f"{statistics.median(with_it) / statistics.median(without):.2f} x",
        "0",
        reached(apart[0] == 0, see="18"),
    )
    fp8 = record("fp8-h100")
    (slow,), (fast,) = ([run["tokens_per_s"] for run in fp8[kind]["by_steps_per_call"]] for kind in ("bfloat16", "fp8"))
    yield Row(
        "`rollout.quantization=fp8`, 7B text, 1,024 x (256 + 512), tokens/s, one H100",
        f"{rounded(slow)} in bfloat16",
        f"{rounded(fast)}: {fast / slow:.2f} x",
        "1.3 x",
        reached(fast >= 1.3 * slow, see="19"),
    )
    update = record("newer-h200")["update"]
    yield Row(
        "update, `adamw_bf16`, selective checkpointing: Qwen3-VL-4B, compared with Qwen2.5-VL-3B",
        f"{percent(update['vl']['mfu'])}, {rounded(update['vl']['tokens_per_second'])} tokens/s",
        f"{percent(update['vl3-4b']['mfu'])}, {rounded(update['vl3-4b']['tokens_per_second'])} tokens/s",
        "",
        "see 20",
    )
    yield Row(
        "the same, Qwen3-30B-A3B with 6 layers, MFU by active parameters",
        "",
        f"{percent(update['moe-30b']['mfu'])}, {rounded(update['moe-30b']['tokens_per_second'])} tokens/s",
        "",
        "see 20",
    )
    stages = record("large-text-7b-h200")["stages"]
    yield Row(
        "text 7B, all weights, KL to the reference, on one GPU: memory of the host and of the GPU",
        "",
        f"{max(stage['processes_gib'] or 0 for stage in stages):.0f} GiB; "
        f"{max(stage['gpu_gib'] or 0 for stage in stages):.0f} GiB",
        "host: 40 GiB",
        reached(max(stage["processes_gib"] or 0 for stage in stages) <= 40),
    )


def _several_gpus() -> Iterator[Row]:
    quiet = record("placement-quiet-h200x4")["placements"]
    one, four = (quiet[name]["seconds"] for name in ("one GPU", "four GPUs, colocated"))
    yield Row(
        "four GPUs against one, the same work on each: efficiency of the update / of the step",
        "1",
        " / ".join(
            f"{one[part] / four[part]:.2f} ({one[part]:.2f} s, {four[part]:.2f} s)" for part in ("update", "step")
        ),
        "0.92",
        reached(*(one[part] / four[part] >= 0.92 for part in ("update", "step")), see="7"),
    )
    pinned = record("placement-pinned-h200x4")["placements"]
    four, split = (pinned[name]["seconds"] for name in ("four GPUs, colocated", "2 train and 2 sample, one step off"))
    yield Row(
        "four GPUs that all train and sample, against 2 + 2 one step off policy",
        f"{split['step']:.2f} s",
        f"{four['step']:.2f} s: {split['step'] / four['step']:.2f} x",
        "",
        "see 7",
    )
    for file, samplers in (
        ("placement-long-tail-h200x2", "one samples"),
        ("placement-long-tail-h200x3", "two sample"),
    ):
        tail = record(file)["placements"][f"one trains and {samplers}, partial rollouts with prefetching"]
        trainer, *others = tail["idle share by rank"]
        seconds, share = tail["seconds"], max(others)
        yield Row(
            f"mean {seconds['completion_tokens_mean']:.0f} tokens, cap 8,192, one GPU trains and {samplers}, partial "
            "rollouts with prefetching: idle share",
            "",
            f"sampler {100 * share:.0f} %, trainer {100 * trainer:.0f} %: a step takes {seconds['step']:.2f} s, its "
            f"update {seconds['update']:.2f} s",
            "10 %",
            f"sampler: {reached(share < 0.1)}, trainer: {reached(trainer < 0.1)}, see 7",
        )
    rows = record("long-rows-h200")["placements"]
    whole, *shared = (
        rows[name]["seconds"]["update"] for name in ("one GPU", "two GPUs share each row", "four GPUs share each row")
    )
    yield Row(
        "rows of 32,256 tokens, two and four GPUs that share each row against one with as many for each: "
        "efficiency of the update",
        "1",
        f"{', '.join(f'{whole / update:.2f}' for update in shared)} "
        f"({', '.join(f'{update:.2f} s' for update in (whole, *shared))})",
        "",
        "see 15",
    )
    found = record("placement-h200x4")
    together, apart, ahead = (
        found["placements"][name]["seconds"]["step"] for name in ("colocated", "apart", "apart, one step off")
    )
    yield Row(
        "four GPUs that all train and sample, against 3 that train and 1 that samples *",
        f"{apart:.1f} s",
        f"{together:.2f} s: {apart / together:.2f} x",
        "1.3 x",
        reached(apart / together >= 1.3, see="7"),
    )
    yield Row(
        "the same, against 3 + 1 one step off policy *",
        f"{ahead:.2f} s",
        f"{together:.2f} s: {ahead / together:.2f} x",
        "",
        "see 7",
    )
    update = record("update-h200")["results"]["text"]
    alone, two = ([update[name][r]["seconds"] for r in ("fixed", "ragged")] for name in ("kept_16", "kept_two_gpus"))
    yield Row(
        "sequence parallelism, update on two GPUs against one, text, fixed / ragged *",
        " / ".join(f"{value:.2f} s" for value in alone),
        " / ".join(f"{value:.2f} s" for value in two)
        + ": "
        + ", ".join(f"{a / b:.2f} x" for a, b in zip(alone, two, strict=True)),
        "",
        "see 8",
    )


def _memory() -> Iterator[Row]:
    found = record("memory-h200")
    peak = record("step-vl-h200")["regimes"]["fixed"]["peer"]["torch_peak_gib"]["median"]
    names = {
        "VL-3B, full, bfloat16": (f"TRL's peak, 32 x 8: {peak:.0f} GiB", 40),
        "VL-7B, full, bfloat16": ("", 80),
        "VL-7B, LoRA of rank 64": ("", 48),
    }
    for name, (other, goal) in names.items():
        run = found[name]
        step = run["regimes"]["fixed"]["seconds"]["median"]
        yield Row(
            f"memory: a step of 8 x 8, {name} *",
            other,
            f"{step:.1f} s on {run['device_gib']} GiB",
            f"a card of {goal} GB",
            reached(run["device_gib"] <= goal, see="9"),
        )


def _growth() -> Iterator[Row]:
    found = record("growth-h200")
    caps = found["by cap"]
    first, last = caps[0], caps[-1]
    power = math.log(last["seconds"] / first["seconds"]) / math.log(last["completion"] / first["completion"])
    yield Row(
        f"growth with the cap, {first['cap']:,} to {last['cap']:,} *",
        "",
        f"sampled tokens ^ {power:.2f}",
        "linear",
        "see 10",
    )
    groups, power = found["by group size"], found["power"]["by group size"]
    yield Row(
        f"growth with the group size, {groups[0]['group']} to {groups[-1]['group']} *",
        "",
        f"update: sampled tokens ^ {power['update']:.2f}; step ^ {power['seconds']:.2f}",
        "linear",
        "see 10",
    )


def _variants() -> Iterator[Row]:
    vl = record("update-h200")["results"]["vl"]
    kept, offload, frozen = vl["kept_32"], vl["offload"]["fixed"], vl["frozen"]
    yield Row(
        "offload, update alone, VL, fixed, with full checkpointing *",
        f"{kept['fixed']['seconds']:.2f} s, {kept['fixed']['peak_gib']:.0f} GiB, all kept",
        f"{offload['seconds']:.1f} s, {offload['peak_gib']:.0f} GiB",
        "",
        f"{percent(offload['mfu'])} MFU",
    )
    regimes = ("fixed", "ragged")
    yield Row(
        "frozen tower, update alone, VL, fixed / ragged *",
        " / ".join(f"{kept[regime]['seconds']:.2f} s" for regime in regimes) + " with a tower that trains",
        " / ".join(f"{frozen[regime]['seconds']:.2f} s" for regime in regimes),
        "",
        " / ".join(percent(frozen[regime]["mfu"]) for regime in regimes) + " MFU",
    )
