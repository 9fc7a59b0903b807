"""An engine and a policy in one process: what a weight sync, a decoder or a partial rollout is measured with."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ranks import FORKED

if TYPE_CHECKING:
    from rlcore.data.prompts import PromptBuilder


class Pictures:
    """Stands in for the image store: pictures drawn in memory."""

    def read(self, image: Any) -> Any:
        from tests.numerics import toy

        return toy.PICTURES[image.sha256]


class Bench:
    """An engine and a policy in one process, and a few problems to compare them by."""

    def __init__(
        self,
        model: Path,
        lora: dict[str, Any] | None,
        ranks: int = 1,
        dtype: str = "auto",
        replay_routes: bool = False,
        quantization: str | None = None,
    ) -> None:
        """
        Args:
            dtype: of the engine.
            ranks: of the world that this process is in, which hold the engine and the policy together.
        """
        from rlcore.sampler.start import set_engine_environment

        set_engine_environment("cpu")
        from torch.distributed.device_mesh import init_device_mesh

        from rlcore.config import ExperimentConfig, ModelConfig
        from rlcore.data.processor import load_processor
        from rlcore.data.prompts import PromptBuilder
        from rlcore.models.loading import empty_hf_model
        from rlcore.models.stored_weights import StoredWeights
        from rlcore.models.torch_policy import TorchPolicy
        from rlcore.sampler.engine import Engine
        from rlcore.sampler.vllm_sampler import VllmSampler
        from tests.numerics import toy

        values = toy.config().model_dump()
        values["model"]["lora"] = lora
        values["rollout"]["tensor_parallel"] = values["resources"]["workers"] = ranks
        values["rollout"] |= {"dtype": dtype, "replay_routes": replay_routes, "quantization": quantization}
        if quantization is not None:
            values["algorithm"]["correction"] = {"name": "truncate"}
        config = ExperimentConfig.model_validate(values)
        processor = load_processor(ModelConfig(path=str(model)))
        prompts = PromptBuilder(processor, config.data.model_copy(update={"template": "tiny"}))
        pictures: Any = Pictures()
        self.engine = Engine(model, config, "cpu", join_world=ranks > 1, reads_weights=False)
        self.sampler = VllmSampler(self.engine, prompts=prompts, images=pictures)
        # the engine made a group of one, in which the policy can live as well
        hf = empty_hf_model(model)
        self.policy = TorchPolicy(
            hf,
            config,
            weights=StoredWeights(model, hf).read,
            mesh=toy.one_rank_mesh() if ranks == 1 else init_device_mesh("cpu", (ranks,)),
            banned_token_ids=prompts.banned_token_ids,
            features=partial(toy.features, model_type=hf.config.model_type),
        )
        self.problems = _problems(None if prompts.placeholders.image_token_id is None else prompts)

    def delta(self) -> float:
        """Largest |delta log-prob| between engine and policy over freshly sampled tokens."""
        from rlcore.rollout.groups import in_order, to_sample
        from tests.sampling import sample_requests

        groups = in_order(self.sampler.generate(sample_requests(self.problems, 2, seed=0, batch="0")))
        samples = [
            to_sample(p, g.prompt_token_ids, c)
            for p, g in zip(self.problems, groups, strict=True)
            for c in g.completions
        ]
        found = self.policy.logprobs([samples])[0]
        return max(float(np.abs(a.logprobs - s.sampler_logprobs).max()) for a, s in zip(found, samples, strict=True))

    def held(self) -> list[Any]:
        return list(self.engine.held_weights())

    def quantised_layers(self, name: str) -> list[Any]:
        """The engine's layers with quantised weights whose name ends like this."""
        from rlcore.sampler.quantised import is_quantised

        model = self.engine.llm.apply_model(lambda model: model)[0]
        return [m for of, m in model.named_modules() if of.endswith(name) and is_quantised(m)]

    def greedy(self) -> list[list[int]]:
        from rlcore.rollout.groups import in_order
        from rlcore.types import SampleRequest

        groups = in_order(self.sampler.generate([SampleRequest(p, 1, 0, greedy=True) for p in self.problems]))
        return [group.completions[0].token_ids.tolist() for group in groups]

    def version(self) -> int:
        from tests.sampling import sample_requests

        (ended,) = self.sampler.generate(sample_requests(self.problems[:1], 1, seed=0, batch="0"))
        return ended[0].completions[0].policy_version

    def shake(self) -> None:
        """Change every parameter that trains."""
        import torch

        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))


def _problems(prompts: PromptBuilder | None) -> list[Any]:
    """
    Args:
        prompts: of a model that takes pictures.
    """
    from rlcore.data.synthetic.geometry import draw_problem
    from rlcore.types import ImageRef, Problem
    from tests.numerics import toy

    text = [Problem(f"text-{n}", f"What is {n} + {n}?", (), "0", "drawn") for n in range(3)]
    if prompts is None:
        return text
    problems = []
    for index in range(4):
        drawn = draw_problem("train", index, 0)
        image = drawn.picture.convert("RGB")
        image = image.resize(prompts.resizing.target_size(*image.size, 3136, 1 << 20))
        toy.PICTURES[drawn.problem_id] = image
        ref = ImageRef(drawn.problem_id, image.width, image.height)
        problems.append(Problem(drawn.problem_id, f"<image>{drawn.question}", (ref,), drawn.answer, "drawn"))
    return [*problems, dataclasses.replace(problems[0], problem_id="text", question="How many?", images=())]


def all_weights(model: Path) -> dict[str, Any]:
    """Before and after every weight was changed, and what a sync that leaves a tensor out says."""
    from rlcore.errors import SamplerError
    from rlcore.families import is_of_tower

    bench = Bench(model, None)
    sampler, policy = bench.sampler, bench.policy
    sampler.load_weights(policy.full_weights(), 0)
    result: dict[str, Any] = {"before": bench.delta()}
    bench.shake()
    result["stale"] = bench.delta()
    of_tower = [name for name, value in policy.tensors().items() if is_of_tower(name) and value.dim() == 2]
    for kind, missing in {"head": "lm_head.weight", "tower": of_tower[-1]}.items():
        try:
            sampler.load_weights(((n, v) for n, v in policy.full_weights() if n != missing), 1)
        except SamplerError as error:
            result[f"without {kind}"] = str(error)
    started = time.monotonic()
    sampler.load_weights(policy.full_weights(), 1)
    result["seconds"] = time.monotonic() - started
    return result | {"after": bench.delta(), "version": bench.version()}


def _child(measure: Callable[[Path], dict[str, Any]], model: Path, queue: Any) -> None:
    try:
        queue.put(measure(model))
    except BaseException:  # noqa: BLE001 - handed to the test, which fails with it
        queue.put(traceback.format_exc())


def measured(measure: Callable[[Path], dict[str, Any]], model: Path) -> dict[str, Any]:
    queue = FORKED.Queue()
    process = FORKED.Process(target=_child, args=(measure, model, queue))
    process.start()
    result = queue.get(timeout=240)
    process.kill()  # an engine takes its time to shut down, and nothing is left to learn from it
    process.join()
    assert isinstance(result, dict), result
    print(result)  # noqa: T201 - shown with -s: the seconds
    return result
