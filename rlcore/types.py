"""The data that the stages of a step exchange (plain, picklable, no torch), and the protocols between them.

Letters in shapes: C completion tokens, P prompt tokens, L = P + C tokens of one sequence, E layers with experts, k
experts of a token in such a layer.
A value at index t describes token t; ``logprobs[t] = log p(token t | tokens < t)``, in nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

# length: cut at its token budget. unfinished: to be continued (rollout.partial), and not graded or trained before that
FinishReason = Literal["stop", "length", "abort", "unfinished"]
Role = Literal["system", "user", "assistant"]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Routes = npt.NDArray[np.uint8] | npt.NDArray[np.int16]  # uint8 below 256 experts


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image of the image store: RGB, and resized to the model's patch grid. Or a video in the family's own input:
    its file has the frames side by side, and names their number and times, so that the hash covers them."""

    sha256: str  # of the original file; names the resized file in the image store
    width: int  # pixels after resizing, of one frame
    height: int
    file: str | None = field(default=None, compare=False)  # of the resized image; None: not resized yet
    frames: int = 1
    seconds_per_frame: float = 0.0  # frame k is what the video shows at (k + 1/2) times this; 0: an image

    @property
    def is_video(self) -> bool:
        return self.seconds_per_frame > 0

    @property
    def frame_pairs(self) -> int:
        """1 for an image, whose second frame is a copy."""
        return (self.frames + 1) // 2

    @property
    def file_size(self) -> tuple[int, int]:
        """Width and height of the stored file."""
        return self.frames * self.width, self.height

    @property
    def moments(self) -> tuple[float, ...]:
        """When each frame of a video is shown, in seconds."""
        return tuple((frame + 0.5) * self.seconds_per_frame for frame in range(self.frames))

    def read(self) -> bytes:
        """The resized image as a PNG file.

        Raises:
            FileNotFoundError: the dataset has no resized image, or it was removed.
        """
        if self.file is None:
            raise FileNotFoundError(f"image {self.sha256} has no file: its dataset has not been resized.")
        return Path(self.file).read_bytes()


@dataclass(frozen=True, slots=True)
class Message:
    """A message before the question: a system message, or a turn of an example."""

    role: Role
    text: str  # with markers, as the question


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a prepared dataset."""

    problem_id: str
    question: str  # with one "<image>" or "<video>" marker per image, in order
    images: tuple[ImageRef, ...]  # and videos; those of the context first
    answer: str
    source: str
    extra: Mapping[str, object] = field(default_factory=dict)  # every other column of the source, JSON values
    context: tuple[Message, ...] = ()
    source_name: str = ""  # in ``data.mixture``; empty: the data has a single source
    chat_template_arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)  # the row's own
    opens_thought: bool | None = None  # the prompt ends with <think>; None: as of rows without own arguments

    @property
    def conversation(self) -> str:
        """Context and question, for people to read."""
        if not self.context:
            return self.question
        return "\n".join(f"[{m.role}] {m.text}" for m in (*self.context, Message("user", self.question)))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Consecutive tokens of a completion that the policy or, if ``given``, the environment wrote."""

    token_ids: Ints  # [T]; the policy's last turn ends with the EOS, if it sampled one
    logprobs: Floats  # [T], of the distribution sampled from (after temperature, top-p and top-k); 0 for given tokens
    given: bool = False  # never trained on


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled answer."""

    turns: tuple[Turn, ...]  # today exactly one, the policy's
    text: str  # special tokens removed
    finish_reason: FinishReason
    policy_version: int  # optimizer steps of the policy that sampled the first token
    # [L - 1, E, k], experts that the sampler chose, of the prompt as well; the last token enters no forward pass
    routes: Routes | None = None  # None: not recorded

    @classmethod
    def one_turn(
        cls,
        token_ids: Ints,
        logprobs: Floats,
        text: str,
        finish_reason: FinishReason,
        policy_version: int,
        routes: Routes | None = None,
    ) -> Completion:
        return cls((Turn(token_ids, logprobs),), text, finish_reason, policy_version, routes)

    @property
    def token_ids(self) -> Ints:
        """[C], of all turns."""
        return self.turns[0].token_ids if len(self.turns) == 1 else np.concatenate([t.token_ids for t in self.turns])

    @property
    def logprobs(self) -> Floats:
        """[C], of all turns."""
        return self.turns[0].logprobs if len(self.turns) == 1 else np.concatenate([t.logprobs for t in self.turns])

    @property
    def by_policy(self) -> Bools:
        """[C], True for tokens of the policy."""
        return np.concatenate([np.full(len(turn.token_ids), not turn.given) for turn in self.turns])


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion. ``graded`` is False if it could not be graded."""

    reward: float
    parts: Mapping[str, float]  # unweighted, by name
    graded: bool
    answer: str | None = field(default=None, compare=False)  # that was graded; None: none, or the reward tells none


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    completion: Completion
    score: Score


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One sequence of an optimizer step: prompt followed by completion."""

    token_ids: Ints  # [L]
    loss_mask: Bools  # [L], True on completion tokens
    sampler_logprobs: Floats  # [L], what the sampler reported; 0 outside the mask
    images: tuple[ImageRef, ...]
    policy_version: int
    advantages: Floats | None = None  # [L], 0 outside the mask; None: not computed yet
    old_logprobs: Floats | None = None  # [L]; None: those of the policy that trains (ratio 1)
    truncation_logprobs: Floats | None = None  # [L], of the old policy; None: as old_logprobs
    ref_logprobs: Floats | None = None  # [L]; None: no KL term
    teacher_logprobs: Floats | None = None  # [L]; -inf: a token that the teacher lacks; None: no teacher
    entropies: Floats | None = None  # [L], nats, of the old policy; None: not needed
    high_entropy: Bools | None = None  # [L], True on tokens that the entropy mask keeps; None: no mask
    routes: Routes | None = None  # [L - 1, E, k], experts that the policy has to use; None: it chooses

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens before the first trained one; all tokens if none is trained."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else self.num_tokens

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the tokens of a completion are chosen, in place of the settings of ``rollout``."""

    temperature: float  # 0: the likeliest token each time
    top_p: float


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """A request for ``count`` completions of one problem. ``seed`` is distinct per (run, step, problem)."""

    problem: Problem
    count: int
    seed: int
    greedy: bool = False  # take the likeliest token each time; count is then 1
    max_tokens: int | None = None  # to sample now; None: to the end of the completion's own budget
    decoding: Decoding | None = None  # for an evaluation; None: that of training
    so_far: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [D] tokens to continue; count is then 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """The answer to one request. A continued completion has only the new tokens and log-probs, but the whole text."""

    prompt_token_ids: Ints  # [P], image tokens expanded; without the continued tokens
    completions: tuple[Completion, ...]
    failure: str = ""  # why an endpoint gave no completion; empty: it did, or there is no endpoint


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """The log-probs of a policy for one sequence, and its entropies; 0 outside the loss mask."""

    logprobs: Floats  # [L], at the sampling temperature, of the whole distribution
    truncation_logprobs: Floats  # [L], log of the probability that top-p and top-k kept; 0 without them
    entropies: Floats | None = None  # [L], nats, of the whole distribution; None: not asked for


class Sampler(Protocol):
    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Sample every request with the current weights.

        Yields:
            Finished groups by their index in ``requests``, so that they can be graded while others are sampled. The
            tokens do not depend on the order. A completion that ``max_tokens`` cuts before its own budget is
            ``unfinished``.
        """


class Grader(Protocol):
    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        """Start grading completion i against problem i; the future holds the scores in the same order."""

    def last_failures(self) -> Sequence[str]:
        """Why the latest ungraded completions are ungraded, oldest first."""

    def take_metrics(self) -> Mapping[str, float]:
        """Figures of the grader itself since the last call, by name."""

    def close(self) -> None: ...


class MetricSink(Protocol):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an optimizer step durably, before the next one starts."""
