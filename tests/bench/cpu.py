"""Whole GRPO steps of ours and of TRL on a CPU, by turns.

``python -m tests.bench.cpu --peer FOLDER --kind text [--regime fixed] [--rounds 2] --out FILE`` with the scripts that
run TRL in FOLDER and TRL installed. Two processes with one thread each on both sides: ours are Ray's workers, which
train and sample by turns; TRL's are torchrun's, each with an engine of its own. The models are the tiny ones of
``cases``. Text: 16 problems x 8, 32 + 64 tokens; vl: 8 x 8, 48 + 48 tokens with a picture of 4 in them.
``--side ours`` needs neither scripts nor TRL.

TRL is changed where it has no path for a CPU or pays for none: weights go into vLLM by ``reload_weights``, since vLLM
on a CPU refuses one weight at a time; activations are kept; 64 sequences go through a forward pass at once. Its engine
computes in the dtype of ours; by itself it would take bfloat16, in which the scripts save the model.

``fixed``: every completion at the cap, so that both sides do the same work. ``ragged``: a bias on the end of the turn
for a mean of half the cap; each side samples its own lengths, so compare real tokens per second.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.cases import common_arguments, random_case, shape_of, vocabulary_of, write
from tests.bench.step import TRL_CHAT, summary

PROCESSES = 2
TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "fullatt_block_indexes": [1]}
PROBLEMS = {"text": 16, "vl": 8}
GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder of the scripts that run TRL")
    parser.add_argument("--kind", choices=tuple(PROBLEMS), default="text")
    parser.add_argument("--regime", choices=("fixed", "ragged"), default="fixed")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--counted", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides' engines")
    parser.add_argument("--side", choices=("both", "ours", "peer"), default="both")
    common_arguments(parser, "/tmp/cpu-bench")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds, arguments.warmup, arguments.counted = 1, 0, 1
    if arguments.side != "ours" and arguments.peer is None:
        parser.error("--side both and peer need --peer, the folder of the scripts that run TRL")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.side == "both":
        by_turns(arguments)
    elif arguments.side == "ours":
        ours(arguments)
    else:
        peer(arguments)


def by_turns(arguments: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, float]]] = {"peer": [], "ours": []}
    runner = ["-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    for turn in range(arguments.rounds):
        for side, before in (("peer", runner), ("ours", [])):
            out = arguments.folder / f"{side}-{arguments.kind}-{arguments.regime}-{turn}.json"
            command = [sys.executable, *before, "-m", "tests.bench.cpu", "--side", side, "--out", str(out)]
            for name in ("peer", "kind", "regime", "warmup", "counted", "dtype", "folder"):
                command += [f"--{name}", str(getattr(arguments, name))]
            with out.with_suffix(".log").open("w") as log:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
            rows[side] += json.loads(out.read_text())["rows"]
    found = {side: summary(steps) for side, steps in rows.items()}
    ratios = {
        "step time, peer / ours": found["peer"]["seconds"]["median"] / found["ours"]["seconds"]["median"],
        "real tokens/s, ours / peer": found["ours"]["tokens_per_s"]["median"] / found["peer"]["tokens_per_s"]["median"],
    }
    settings = {"kind": arguments.kind, "regime": arguments.regime, "dtype": arguments.dtype}
    write(arguments.out, {**settings, **ratios, "medians": found, "rows": rows})


def small_models(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """TRL's scripts, for models of this benchmark's size."""
    sys.path.insert(0, str(arguments.peer))
    base, vl = importlib.import_module("trl_h200"), importlib.import_module("trl_vl_h200")
    base.VOCAB = vocabulary_of(tiny=True)
    text_config, vl_config = base.text_config, vl.vl_config

    def resized(config: Any, **others: Any) -> Any:
        values = {k: v for k, v in config.to_dict().items() if k not in ("layer_types", "max_window_layers")}
        return type(config).from_dict(values | others)

    base.text_config = lambda tiny: resized(text_config(True), num_hidden_layers=4, **TEXT)

    def vl_resized(tiny: bool) -> Any:
        config = vl_config(True)
        text = resized(config.text_config, num_hidden_layers=4, **TEXT).to_dict()
        return resized(config, text_config=text)

    vl.vl_config = vl_resized
    return base, vl


def ours(arguments: argparse.Namespace) -> None:
    from tests.bench.placement import placed

    shape, problems = shape_of(arguments.kind, tiny=True), PROBLEMS[arguments.kind]
    case = random_case(
        arguments.kind,
        arguments.folder,
        problems=problems * (arguments.warmup + arguments.counted + 1),
        prompt_tokens=shape.prompt,
        side=shape.side,
        tiny=True,
    )
    options = argparse.Namespace(
        problems=problems,
        group=GROUP,
        cap=shape.cap,
        mean=shape.cap / 2,
        tokens_per_microbatch=8192,
        regime=arguments.regime,
        warmup=arguments.warmup,
        counted=arguments.counted,
        set=[
            f"rollout.dtype={arguments.dtype}",
            "rollout.kv_cache_mib=64",
            "model.gradient_checkpointing=none",
            "resources.threads_per_worker=1",
            *arguments.set,
        ],
    )
    result = placed(options, case, [f"resources.workers={PROCESSES}"])
    write(arguments.out, {"rows": [{**row, "seconds": row["step"]} for row in result["rows"]]})


def peer(arguments: argparse.Namespace) -> None:
    """One of TRL's processes."""
    base, _ = small_models(arguments)
    rank, shape, problems = int(os.environ["RANK"]), shape_of(arguments.kind, tiny=True), PROBLEMS[arguments.kind]
    text = shape.prompt if arguments.kind == "text" else shape.prompt - TRL_CHAT - (shape.side // 28) ** 2
    helped(base, arguments.dtype)
    out = arguments.folder / f"peer-rank-{rank}.json"
    sizes = {
        "prompts": problems // PROCESSES,
        "group": GROUP,
        "cap": shape.cap,
        "prompt-tokens": text,
        "micro": problems * GROUP // PROCESSES,
        "warmup": arguments.warmup,
        "counted": arguments.counted,
    }
    words = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    words += ["--regimes", arguments.regime, "--model-dir", str(arguments.folder / f"peer-model-{rank}")]
    words += ["--out", str(out), *(["--side", str(shape.side)] if arguments.kind == "vl" else [])]
    script = "trl_vl_h200" if arguments.kind == "vl" else "trl_h200"
    sys.argv = [script, *words]
    sys.modules[script].main()
    steps = [row for row in json.loads(out.read_text())["steps"] if row["counted"]]
    for row in steps:  # each process counts its own
        row["tokens_per_s"] *= PROCESSES
    if rank == 0 and arguments.out is not None:
        arguments.out.write_text(json.dumps({"rows": steps}))


def helped(base: Any, dtype: str) -> None:
    """Changes TRL as the docstring of this module says; ``dtype`` is its engine's, which it has no setting for."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)

    def sync_weights(self: Any) -> None:
        weights = {"weights_iterator": self._iter_named_params(), "is_checkpoint_format": True}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    config = base.grpo_config

    def without_checkpointing(*given: Any) -> Any:
        found = config(*given)
        found.gradient_checkpointing = False
        return found

    base.grpo_config = without_checkpointing


if __name__ == "__main__":
    main()
