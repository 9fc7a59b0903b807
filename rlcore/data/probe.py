"""Fixed inputs whose log-probs identify a set of weights.

Every checkpoint holds the live trainer's log-probs of them. A merged model must give the same numbers, in transformers
and in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from rlcore.data.prompts import PromptBuilder
from rlcore.errors import ModelError
from rlcore.types import Floats, ImageRef, Problem, TrainingSample

NUM_SEQUENCES = 4
PROBE_FILE = "canary.json"  # in a checkpoint


class ProbePolicy(Protocol):
    def probe_samples(self, problems: Sequence[Problem]) -> list[TrainingSample]: ...
    def probe_logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]: ...


@dataclass(frozen=True, slots=True)
class Probe:
    samples: tuple[TrainingSample, ...]

    @classmethod
    def of(cls, problems: Sequence[Problem], policy: ProbePolicy) -> Self:
        """The probe of a dataset: its first problems."""
        return cls(tuple(policy.probe_samples(problems[:NUM_SEQUENCES])))

    def write(self, folder: Path, policy: ProbePolicy) -> None:
        """Write the inputs and the policy's log-probs into the folder of a checkpoint."""
        sequences = [
            ProbeSequence(
                token_ids=tuple(sample.token_ids.tolist()),
                completion_start=int(np.argmax(sample.loss_mask)),
                images=sample.images,
                logprobs=tuple(logprobs[sample.loss_mask].tolist()),
            ).model_dump()
            for sample, logprobs in zip(self.samples, policy.probe_logprobs(self.samples), strict=True)
        ]
        (folder / PROBE_FILE).write_text(json.dumps({"sequences": sequences}))


def probe_samples(problems: Sequence[Problem], prompts: PromptBuilder) -> list[TrainingSample]:
    """One sample per problem. Its completion is the boxed answer."""
    samples = []
    for problem in problems:
        prompt = prompts.tokens(problem)
        answer = prompts.tokenizer.encode(f"\\boxed{{{problem.answer}}}", add_special_tokens=False)
        mask = np.zeros(len(prompt) + len(answer), np.bool_)
        mask[len(prompt) :] = True
        samples.append(
            TrainingSample(
                token_ids=np.concatenate([prompt, np.asarray(answer, np.int32)]),
                loss_mask=mask,
                sampler_logprobs=np.zeros(len(mask), np.float32),
                images=problem.images,
                policy_version=0,
            )
        )
    return samples


class ProbeSequence(BaseModel):
    """One fixed input of L tokens, the last C of them completion, and the live trainer's log-probs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: tuple[int, ...]  # [L], image tokens expanded
    completion_start: int
    images: tuple[ImageRef, ...]
    logprobs: tuple[float, ...]  # [C] nats, temperature 1


def read_probe(path: Path) -> list[ProbeSequence]:
    """
    Raises:
        ModelError: the file is missing or holds no log-probs.
    """
    if not path.is_file():
        raise ModelError(f"{path} does not exist: the checkpoint cannot be verified. Choose one that has this file.")
    sequences = [ProbeSequence.model_validate(item) for item in json.loads(path.read_text())["sequences"]]
    if not any(sequence.logprobs for sequence in sequences):
        raise ModelError(f"{path} holds no log-probs, so it verifies nothing. Choose another checkpoint.")
    return sequences
