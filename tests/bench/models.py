"""``make check-models``: check-model on tiny random models of every family, and docs/models.md from its results."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.artifacts import CheckRow, ModelCheck
from rlcore.errors import RlflowError
from rlcore.models.comparison import FLOAT32_TOLERANCE
from tests.checking import FAMILIES, REFUSED, checked, make_model, sampled_on_a_cpu, settings_on_a_cpu
from tests.integration.engine_bench import measured

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SETTINGS = (
    ("qwen2_5_vl", "model.lora.rank=8"),
    ("qwen2_5_vl", "model.freeze_vision_tower=true"),
    ("qwen2_5_vl", "model.compute_dtype=bfloat16"),
    ("qwen2_vl", "data.video_input=native"),
    ("qwen2_5_vl", "data.video_input=native"),
    ("qwen3_vl", "data.video_input=native"),
    ("qwen3_vl_moe", "data.video_input=native"),
    ("qwen3_5", "rollout.dtype=bfloat16", "data.video_input=native"),
    ("qwen3_vl", "model.lora.rank=8"),
    ("qwen3_vl", "model.freeze_vision_tower=true"),
    ("qwen3_vl", "model.compute_dtype=bfloat16"),
    ("qwen3_vl_moe", "model.freeze_vision_tower=true"),
    ("qwen3_vl_moe", "model.compute_dtype=bfloat16"),
    ("qwen3_5", "rollout.dtype=bfloat16", "model.lora.rank=8"),
    ("qwen3_5", "rollout.dtype=bfloat16", "model.freeze_vision_tower=true"),
    ("qwen3_5", "rollout.dtype=bfloat16", "model.compute_dtype=bfloat16"),
    ("qwen3_5_moe", "rollout.dtype=bfloat16", "model.compute_dtype=bfloat16"),
    ("glm4v", "model.lora.rank=8"),
    ("glm4v", "model.freeze_vision_tower=true"),
    ("glm4v", "model.compute_dtype=bfloat16"),
    ("internvl", "model.lora.rank=8"),
    ("internvl", "model.freeze_vision_tower=true"),
    ("internvl", "model.compute_dtype=bfloat16"),
    ("idefics3", "model.lora.rank=8"),
    ("idefics3", "model.lora.vision_tower=true"),
    ("idefics3", "model.freeze_vision_tower=true"),
    ("idefics3", "model.compute_dtype=bfloat16"),
    ("qwen3_moe", "model.lora.rank=8"),
    ("qwen3_moe", "model.compute_dtype=bfloat16"),
    ("gemma3_text", "model.lora.rank=8"),
    ("llama", "model.lora.rank=8"),
    ("llama", "model.compute_dtype=bfloat16"),
    ("llama", "rollout.dtype=bfloat16"),
    ("llama", "training.optimizer=adamw_bf16"),
)
# in addition to every family
ON_GPU = (
    ("qwen2_5_vl", "model.lora.rank=8"),
    ("qwen3_vl", "model.lora.rank=8"),
    ("qwen3_moe", "model.lora.rank=8"),
    ("qwen3_vl_moe", "model.freeze_vision_tower=true"),
    ("qwen2", "model.compute_dtype=float32", "rollout.dtype=float32"),
)
RECORD = Path(__file__).parent / "models-gpu.json"
_HEAD = """\
# Models: what was compared

Written by `make check-models` from what it measured, {where}.

Each row is a model of one `model_type` with three layers and random weights. `.venv/bin/rlflow check-model FOLDER`
compared the trainer and vLLM with transformers' own forward pass in float32 ([own
model](howto/own-model.md#is-it-used-correctly)). A cell has the largest difference: of a token's log-prob in nats, or
for the gradient of a parameter as a share of its size.
**Bold** differs by more than is allowed, which is {allowed:g} in float32. A run compares its own model, with its own
weights, before it trains.

Llama 3 and DeepSeek-R1-Distill-Llama are llama with long context. Qwen2.5 and DeepSeek-R1-Distill-Qwen are `qwen2`.
Phi-4 is `phi3`, and Phi-4-mini turns part of each head. Gemma 3 has a sliding window of 16 tokens here, which all of
its sequences exceed; `gemma3_text` is its text model, such as Gemma-3-1B. InternVL3.5 is `internvl`, and InternVL3
has the older decoder. The first SmolVLM is `idefics3`, SmolVLM2 is `smolvlm`. The tiles of InternVL and SmolVLM have
28 x 28 pixels here, and a picture has six to nine of them and one of the whole picture. GLM-4.1V is `glm4v`. `gemma3`
is Gemma 3 with pictures, of 84 x 84 pixels and 36 tokens here, which attend to each other in both directions. Qwen3.5
is `qwen3_5`, and with experts `qwen3_5_moe`. Two of its three layers have a recurrent state here, which vLLM computes
on a CPU in bfloat16 only.
With adapters vLLM computes experts by Triton alone, which a CPU does not have. In bfloat16 rounding sends some tokens
to another expert than in float32, so more is allowed there.

"""
_ON_GPU = """
## On a GPU

The same comparisons {where}. The trainer and vLLM
compute in bfloat16, and what is allowed is derived from how far transformers' own forward pass in bfloat16 is from that
in float32. In float32 vLLM attends by a Triton kernel, whose products are rounded to TF32 (by its source: `tl.dot`
without a precision), so it differs by more than is allowed. `gemma3` and the four models named `qwen3_5` were compared
later than the others, `gemma3` and `qwen3_5_text` on an H100. Sampling the `qwen3_5` models needs no flashinfer.

"""
_FOOT = """
What each column compares:

| check | what is compared |
| --- | --- |
| trainer: packed row | all sequences in one row, their prompt shared, against one sequence at a time |
| trainer: gradient | of that row, against the sum over sequences |
| adapters at zero | LoRA before its first step, against the model without it |
| adapters, merged | LoRA with random values, against the merged folder in transformers |
| merge | changed weights, written as a checkpoint and merged, against the same weights in memory |
| vLLM | the engine after its first weight sync |
| vLLM after a weight sync | the engine after all that trains has changed, against transformers with the same change |

The sequences: a text, a group of three completions that shares its prompt, and with pictures also two pictures of
different sizes in one prompt, and a video as a list of frames. With `data.video_input=native` also a picture and a
video of five frames in one prompt, and a group that shares a video of eight seconds.
"""


def compare(name: str, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """``ModelCheck`` as plain values, or the refusal. If vLLM on a CPU computes another model: the check without vLLM's
    rows, and vLLM's refusal."""
    model = make_model(folder / "model", name)
    try:
        return checked(model, *overrides).model_dump()
    except RlflowError as error:
        if sampled_on_a_cpu(name):
            return {"refused": str(error)}
        refusal = {"not_sampled": str(error)}
    return checked(model, *overrides, with_engine=False).model_dump() | refusal


def record() -> dict[str, dict[str, Any]]:
    """What was found on a GPU."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def page(results: dict[str, dict[str, Any]], on_gpu: dict[str, dict[str, Any]]) -> str:
    """docs/models.md.

    Args:
        on_gpu: as ``results``, of a GPU. May be empty.
        results: by row, from ``compare``.
    """
    notes = [line for name, made in results.items() for line in refusals(name, made)]
    found = table(results) + (f"\nRefused:\n\n{''.join(notes)}" if notes else "")
    if on_gpu:
        notes = [line for name, made in on_gpu.items() for line in refusals(name, made)]
        found += _ON_GPU.format(where=device(on_gpu)) + table(on_gpu)
        found += f"\nRefused:\n\n{''.join(notes)}" if notes else ""
    return _HEAD.format(where=device(results), allowed=FLOAT32_TOLERANCE) + found + _FOOT


def device(results: dict[str, dict[str, Any]]) -> str:
    check = next(iter(compared(results).values()))
    name, versions = check.device.upper(), ", ".join(map(" ".join, check.versions.items()))
    return f"on {'an' if name.startswith('NVIDIA') else 'a'} {name} with {versions}"


def compared(results: dict[str, dict[str, Any]]) -> dict[str, ModelCheck]:
    plain = {name: {key: made[key] for key in made if key != "not_sampled"} for name, made in results.items()}
    return {name: ModelCheck.model_validate(made) for name, made in plain.items() if "refused" not in made}


def table(results: dict[str, dict[str, Any]]) -> str:
    checks = compared(results)
    names = [row.name for row in next(iter(checks.values())).rows]
    lines = [f"| model | {' | '.join(names)} |\n", "| --- " * (1 + len(names)) + "|\n"]
    lines += [f"| {name} | {' | '.join(cells(checks.get(name), len(names)))} |\n" for name in results]
    return "".join(lines)


def cells(check: ModelCheck | None, count: int) -> list[str]:
    """Of one row; what was not compared is refused."""
    found = [] if check is None else [_cell(row) for row in check.rows]
    return [*found, *["refused"] * (count - len(found))]


def refusals(name: str, made: dict[str, Any]) -> list[str]:
    """The line of a row that is refused, or that vLLM on a CPU does not compute."""
    kinds = {"refused": name, "not_sampled": f"{name}, vLLM on a CPU"}
    return [f"- {named}: {_reason(made[kind])}\n" for kind, named in kinds.items() if kind in made]


def _cell(row: CheckRow) -> str:
    return f"{row.largest:.0e}" if row.passed else f"**{row.largest:.0e}**"


def _reason(message: str) -> str:
    """The refusal from its error on, without the model's folder and lists of names."""
    reason = message.partition(" cannot be sampled from while it trains: ")[2] or message
    return f"`{reason.split(chr(10))[0].partition('. ')[0][:320]}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--tiny", action="store_true", help="the first family alone")
    parser.add_argument("--on-gpu", type=Path, help="compare on the GPU, and write what was found to this record")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th row from the I-th on, of a record")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    if arguments.on_gpu is None:
        models = [*((family, *settings_on_a_cpu(family)) for family in (*FAMILIES, *REFUSED)), *SETTINGS]
    else:
        first, step = map(int, arguments.part.split("/"))  # a family's error is recorded: the others are compared
        models = [*((family,) for family in FAMILIES), *ON_GPU][first::step]
    for name, *overrides in models[: 1 if arguments.tiny else None]:
        row = ", ".join([f"`{name}`" if "," not in name else name, *(f"`{override}`" for override in overrides)])
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # all that was measured
            settings = overrides if arguments.on_gpu is None else [*overrides, "resources.device=cuda"]
            try:
                results[row] = measured(partial(compare, name, settings), Path(folder))
            except AssertionError as error:  # with the traceback of the process that compared
                if arguments.on_gpu is None:
                    raise
                results[row] = {"refused": str(error).strip().splitlines()[-1]}
        print(row, results[row].get("seconds", results[row].get("refused")), file=sys.stderr, flush=True)  # noqa: T201
        if arguments.on_gpu is not None:
            arguments.on_gpu.write_text(json.dumps(results, indent=1))
    if arguments.on_gpu is None:
        arguments.out.write_text(page(results, record() if arguments.out == PAGE else {}))
    wrong = [row for row, made in results.items() if any(not r["passed"] for r in made.get("rows", ()))]
    os._exit(1 if wrong else 0)  # engines of children take their time to shut down


if __name__ == "__main__":
    main()
