"""Samples over drawn pictures, for tests that run the real policy without a dataset or a sampler."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import ImageFeatures, prompt_key
from rlcore.config import DataConfig, ExperimentConfig, build_experiment
from rlcore.data.pixels import IMAGE_MARKER
from rlcore.data.prompts import PromptBuilder
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.data.tiny import build_processor
from rlcore.distributed.group import SequenceSize, plan_microbatches
from rlcore.models.loading import empty_hf_model
from rlcore.models.stored_weights import StoredWeights, Values
from rlcore.models.teacher import Teacher
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import ImageRef, Problem, TrainingSample
from tests.ranks import whole

PROCESSOR = build_processor()
# by model type, where it is another
PROCESSORS = {
    name: build_processor(name) for name in ("qwen3_vl", "glm4v", "internvl", "idefics3", "smolvlm", "gemma3")
}
PROCESSORS |= dict.fromkeys(("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), PROCESSORS["qwen3_vl"])
GRIDS = PromptBuilder(PROCESSOR, DataConfig(template="tiny"))
# by model type, where pictures have other tokens
PROMPTS = {
    name: PromptBuilder(PROCESSORS[name], DataConfig(template="tiny"))
    for name in ("glm4v", "internvl", "idefics3", "smolvlm", "gemma3")
}
BANNED = list(GRIDS.banned_token_ids)
PICTURES: dict[str, Image.Image] = {}


def config(**algorithm: object) -> ExperimentConfig:
    return build_experiment(
        {
            "name": "toy",
            "data": {"max_prompt_tokens": 200},
            "rollout": {"group_size": 4, "max_completion_tokens": 32, "temperature": 0.9},
            "algorithm": algorithm,
            "training": {"problems_per_batch": 2, "tokens_per_microbatch": 4096, "learning_rate": 1e-3},
            "model": {"gradient_checkpointing": "none"},
        }
    )


def features(image: ImageRef, model_type: str = "") -> ImageFeatures:
    """Pixels and grid as models of this type take them. The number of tokens of these pictures is the same for all."""
    picture = PICTURES[image.sha256]
    if model_type in PROMPTS:
        return ImageFeatures(*PROMPTS[model_type].read(picture))
    out = PROCESSORS.get(model_type, PROCESSOR).image_processor(images=[picture], return_tensors="pt")
    time, height, width = out["image_grid_thw"][0].tolist()
    return ImageFeatures(out["pixel_values"], (time, height, width))


def samples(
    count: int = 8, *, group: int = 4, seed: int = 0, text_only: bool = False, model_type: str = ""
) -> list[TrainingSample]:
    """Ragged sequences; ``group`` of them share a picture. Random completions, advantages of either sign.

    Args:
        model_type: with pictures and tokens as models of this type take them. Those of all Qwen types are the
            same.
    """
    random = np.random.default_rng(seed)
    prompts = PROMPTS.get(model_type, GRIDS)
    found = []
    for index in range(count):
        problem = draw_problem("train", index // group, seed)
        picture = problem.picture.convert("RGB")
        image = picture.resize(prompts.target_size(*picture.size))
        sha = hashlib.sha256(image.tobytes()).hexdigest()
        PICTURES[sha] = image
        images = () if text_only else (ImageRef(sha, image.width, image.height),)
        before = "<|vision_start|><|vision_end|>" if text_only else IMAGE_MARKER
        prompt = prompts.tokens(Problem(str(index), before + problem.question, images, "", "toy"))
        answer = random.integers(0, 256, random.integers(3, 30)).astype(np.int32)
        mask = np.zeros(len(prompt) + len(answer), np.bool_)
        mask[len(prompt) :] = True
        found.append(
            TrainingSample(
                token_ids=np.concatenate([prompt, answer]),
                loss_mask=mask,
                sampler_logprobs=np.where(mask, random.normal(-5, 0.1, len(mask)), 0).astype(np.float32),
                advantages=np.where(mask, random.normal(), 0).astype(np.float32),
                images=images,
                policy_version=0,
            )
        )
    return found


def plan(samples: Sequence[TrainingSample], *, num_ranks: int, token_budget: int) -> list[list[list[int]]]:
    """As the worker group plans it."""
    return plan_microbatches(
        [SequenceSize(s.num_prompt, s.num_tokens - s.num_prompt) for s in samples],
        [prompt_key(s) for s in samples],
        num_ranks=num_ranks,
        token_budget=token_budget,
        attention_weight=1e-3,
    )


def one_rank_mesh() -> object:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


def save(trained: TorchPolicy, folder: Path) -> None:
    trained.begin_save(folder)
    while not trained.saved():
        time.sleep(0.01)


def policy(
    folder: Path, settings: ExperimentConfig, mesh: object | None = None, teacher: Path | None = None
) -> TorchPolicy:
    torch.set_num_threads(1)
    hf = empty_hf_model(folder)
    other = None if teacher is None else empty_hf_model(teacher)
    return TorchPolicy(
        hf,
        settings,
        weights=StoredWeights(folder, hf).read,
        mesh=mesh or one_rank_mesh(),
        banned_token_ids=BANNED,
        features=partial(features, model_type=hf.config.model_type),
        teacher=None if teacher is None or other is None else Teacher(other, StoredWeights(teacher, other).read),
    )


def emptied(hf: nn.Module) -> Values:
    """Move the parameters of a model in memory to the meta device, and return their values."""
    values = {name: value.detach() for name, value in hf.state_dict().items()}
    empty: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in hf.modules():
        for name, parameter in module.named_parameters(recurse=False):
            meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            setattr(module, name, empty.setdefault(id(parameter), meta))
    return lambda name, rows: values[name][rows]


class Rank:
    """A rank's worker that holds a policy and no sampler."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy, self.update = policy, policy.update


def in_one_vector(policy: TorchPolicy, gradients: dict[str, Tensor]) -> Tensor:
    """Those that were kept, in the order of the policy's parameters, each of which has one."""
    return torch.cat([gradients[name].flatten() for name, _ in policy.model.named_parameters()])


def keep_gradients(policy: TorchPolicy, *, then_step: bool) -> dict[str, Tensor]:
    """By parameter, whole and clipped, from the next update on, as the optimizer gets them: for all parameters at once,
    or with ``training.offload`` for some at a time."""
    kept: dict[str, Tensor] = {}
    step = policy.optimizer.step

    def keep() -> None:
        named = policy.model.named_parameters()
        kept.update({name: whole(p.grad).cpu() for name, p in named if p.grad is not None})
        if then_step:
            step()

    policy.optimizer.step = keep  # type: ignore[method-assign]
    return kept


def huggingface_logprobs(folder: Path, sample: TrainingSample, temperature: float) -> np.ndarray:
    """One sequence at a time through transformers' own forward, positions and masks."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    inputs = {}
    if sample.images:
        image = features(sample.images[0], model.config.model_type)
        inputs = {
            "pixel_values": image.pixel_values,
            "image_grid_thw": torch.tensor([image.grid_thw]),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits[0] / temperature
    logits[:, BANNED] = float("-inf")
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return np.where(sample.loss_mask, np.concatenate([[0.0], logprobs.numpy()]), 0.0)


def step_gradient(
    policy: TorchPolicy, microbatches: list[list[TrainingSample]], kl_coefficient: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """The whole gradient of one optimizer step as one vector, taken before AdamW sees it."""
    gradients = keep_gradients(policy, then_step=False)
    every = [s for m in microbatches for s in m]
    totals = StepTotals(tokens=sum(s.num_trained for s in every), sequences=len(every))
    result = policy.update(microbatches, totals, 1e-3, kl_coefficient)
    factor = max(1.0, result.grad_norm / policy.config.training.max_grad_norm)
    return in_one_vector(policy, gradients) * factor, {"norm": result.grad_norm}
