"""On-policy distillation: the teacher's log-probs on every rank, its signal as an advantage, and the gradient of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.divergence import MAX_LOG_RATIO, teacher_signal
from rlcore.algorithms.loss import StepTotals
from rlcore.artifacts import ModelRef
from rlcore.config import AlgorithmConfig, ExperimentConfig, ModelConfig, TinyModelConfig, build_experiment
from rlcore.data.tiny import build_processor, build_text_tokenizer
from rlcore.errors import ModelError
from rlcore.jobs.bootstrap import bootstrap
from rlcore.models.loading import save_published
from rlcore.models.teacher import _reading, require_same_tokens, within_vocabulary, without_unknown
from rlcore.models.tiny import build_model, build_text_model
from rlcore.models.torch_policy import TorchPolicy
from rlcore.rollout.advantages import attach_advantages
from rlcore.rollout.groups import Group
from rlcore.specs import BootstrapSpec
from rlcore.types import Completion, Problem, Score, ScoredTokens, TrainingSample
from tests.numerics import toy
from tests.numerics.toy import huggingface_logprobs, step_gradient
from tests.ranks import on_ranks

ALONE = {"path": "tiny", "task_reward": False}


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with other random weights and a head of its own."""
    folder = tmp_path_factory.mktemp("teacher")
    save_published(build_model(None, seed=7, tied=False), folder)
    build_processor(None).save_pretrained(folder)
    return folder


def with_both(policy: TorchPolicy, microbatches: list[list[TrainingSample]]) -> list[list[TrainingSample]]:
    """The samples with log-probs of the policy and the teacher."""
    old, teacher = policy.logprobs(microbatches), policy.teacher_logprobs(microbatches)
    return [
        [
            replace(s, old_logprobs=o.logprobs, teacher_logprobs=t.logprobs)
            for s, o, t in zip(samples, os, ts, strict=True)
        ]
        for samples, os, ts in zip(microbatches, old, teacher, strict=True)
    ]


def distilled(samples: list[TrainingSample], algorithm: AlgorithmConfig) -> list[TrainingSample]:
    """Their advantages, with rewards that are all equal."""
    nothing = Completion.one_turn(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "stop", 0)
    scores = (Score(1.0, {}, graded=True),) * 4
    groups = [
        Group(0, Problem("p", "", (), "", ""), "0", 0, np.zeros(1, np.int32), (nothing,) * 4, scores, samples=tuple(s))
        for s in (samples[first : first + 4] for first in range(0, len(samples), 4))
    ]
    return attach_advantages(groups, algorithm, kl_coefficient=0.0).samples


def test_the_teachers_logprobs_are_those_of_transformers_at_the_policys_temperature(
    tiny_model: Path, other_model: Path
) -> None:
    samples = toy.samples(4, group=2)
    policy = toy.policy(tiny_model, toy.config(teacher=ALONE), teacher=other_model)
    for sample, values in zip(samples, policy.teacher_logprobs([samples])[0], strict=True):
        np.testing.assert_allclose(values.logprobs, huggingface_logprobs(other_model, sample, 0.9), atol=2e-5)


def test_a_teacher_may_have_another_architecture_and_the_policy_a_frozen_tower_and_adapters(
    tiny_model: Path, deepstack_model: Path, other_model: Path
) -> None:
    base = toy.config(teacher=ALONE)
    for model in ({"freeze_vision_tower": True}, {"lora": {"rank": 4}}):
        settings = build_experiment({**base.model_dump(mode="json"), "model": model})
        samples = toy.samples(4, group=2)
        policy = toy.policy(tiny_model, settings, teacher=other_model)
        for sample, values in zip(samples, policy.teacher_logprobs([samples])[0], strict=True):
            np.testing.assert_allclose(values.logprobs, huggingface_logprobs(other_model, sample, 0.9), atol=2e-5)
    texts = toy.samples(4, text_only=True)  # these read pictures differently
    policy = toy.policy(tiny_model, base, teacher=deepstack_model)
    for sample, values in zip(texts, policy.teacher_logprobs([texts])[0], strict=True):
        np.testing.assert_allclose(values.logprobs, huggingface_logprobs(deepstack_model, sample, 0.9), atol=2e-5)


def test_a_teacher_that_is_the_policy_gives_a_gradient_of_exactly_0(tiny_model: Path) -> None:
    settings = toy.config(teacher=ALONE)
    policy = toy.policy(tiny_model, settings, teacher=tiny_model)
    parts = with_both(policy, [toy.samples(8)[:4], toy.samples(8)[4:]])
    samples = distilled([s for part in parts for s in part], settings.algorithm)
    assert all(not s.advantages.any() for s in samples)
    gradient, _ = step_gradient(policy, [samples[:4], samples[4:]], 0.0)
    assert not gradient.any()


def test_the_advantage_is_the_teachers_signal_and_no_group_is_without_one(tiny_model: Path, other_model: Path) -> None:
    settings = toy.config(teacher={**ALONE, "coefficient": 0.5})
    policy = toy.policy(tiny_model, settings, teacher=other_model)
    scored = with_both(policy, [toy.samples(8)])[0]
    samples = distilled(scored, settings.algorithm)
    for before, after in zip(scored, samples, strict=True):
        expected = 0.5 * (before.teacher_logprobs - before.old_logprobs)
        np.testing.assert_allclose(after.advantages, expected, rtol=1e-5)
        assert after.teacher_logprobs is None
    gradient, _ = step_gradient(policy, [samples], 0.0)
    assert gradient.norm() > 0


def test_a_teacher_goes_to_the_host_and_comes_back_the_same(tiny_model: Path, other_model: Path) -> None:
    base = toy.config(teacher=ALONE, kl={"coefficient": 0.1})
    offloaded = base.model_copy(update={"training": base.training.model_copy(update={"offload": True})})
    scored = []
    for settings in (base, offloaded):
        policy = toy.policy(tiny_model, settings, teacher=other_model)
        scored += [policy.teacher_logprobs([toy.samples(4)])[0], policy.teacher_logprobs([toy.samples(4)])[0]]
    held = [p.to_local().untyped_storage().nbytes() for p in policy.teacher.parameters() if p.nbytes > 4096]
    assert sum(held) == 0 < len(held)
    for values in scored[1:]:
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(values, scored[0], strict=True))


def _rank(rank: int, world: int, model: str, teacher: str, out: str) -> None:
    settings = toy.config(teacher={"path": "tiny"})
    policy = toy.policy(Path(model), settings, init_device_mesh("cpu", (world,)), Path(teacher))
    samples = toy.samples(12, group=4)
    plan = toy.plan(samples, num_ranks=world, token_budget=400)
    mine = with_both(policy, [[samples[i] for i in micro] for micro in plan[rank]])
    mine = [
        [replace(s, advantages=s.advantages + (s.teacher_logprobs - s.old_logprobs), teacher_logprobs=None) for s in m]
        for m in mine
    ]
    gradients = toy.keep_gradients(policy, then_step=False)
    policy.update(mine, StepTotals(sum(s.num_trained for s in samples), len(samples)), 0.0, 0.0)
    if rank == 0:
        torch.save(torch.cat([gradients[name].flatten() for name in sorted(gradients)]), out)


def test_two_ranks_take_the_step_of_one(tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        on_ranks(world, _rank, str(tiny_model), str(other_model), str(out))
        found.append(torch.load(out, weights_only=True))
    one, two = found
    assert one.norm() > 0
    assert float((one - two).norm() / one.norm()) < 2e-6


def test_the_mean_policy_gradient_is_the_gradient_of_the_reverse_kl() -> None:
    """All 4^3 sequences of a vocabulary of 4 that one table of logits per prefix generates: the mean over the policy's
    own sequences of the sum of A grad log p, against the gradient of the sum over prefixes of the exact KL, in which
    the probabilities of the prefixes have no gradient (discount 0)."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, length = 4, 3
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * length)
    prefixes = [(vocabulary**t - 1) // (vocabulary - 1) for t in range(length)]  # first row of each depth

    def rows(t: int) -> torch.Tensor:
        place = torch.zeros(len(sequences), dtype=torch.long)
        for earlier in range(t):
            place = place * vocabulary + sequences[:, earlier]
        return prefixes[t] + place

    policy = torch.randn(21, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(21, vocabulary, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp = policy.log_softmax(-1)
    own = torch.stack([logp[rows(t), sequences[:, t]] for t in range(length)], 1)
    other = torch.stack([teacher[rows(t), sequences[:, t]] for t in range(length)], 1)
    chance = own.detach().sum(1).exp()
    assert float(chance.sum()) == pytest.approx(1)
    loss = -(chance[:, None] * teacher_signal(own.detach(), other) * own).sum()
    (found,) = torch.autograd.grad(loss, policy, retain_graph=True)

    exact = (logp.exp() * (logp - teacher)).sum(-1)  # [21] KL at each prefix
    reached = torch.zeros(21, dtype=torch.float64)
    for t in range(length):
        reached.index_add_(0, rows(t), chance)
    (wanted,) = torch.autograd.grad((reached * exact).sum(), policy)
    torch.testing.assert_close(found, wanted)
    assert wanted.norm() > 0.1


def test_the_signal_is_bounded_and_has_no_gradient() -> None:
    own = torch.tensor([-1.0, -2.0, -3.0, -0.5], requires_grad=True)
    signal = teacher_signal(own, torch.tensor([-1.5, -1.0, -torch.inf, -80.0]))
    assert signal.tolist() == [-0.5, 1.0, -MAX_LOG_RATIO, -MAX_LOG_RATIO]
    assert not signal.requires_grad


def test_tokens_that_the_teacher_lacks_are_impossible_to_it() -> None:
    mask = np.array([False, False, True, True])
    sample = TrainingSample(np.array([9, 1, 8, 3], np.int32), mask, np.zeros(4, np.float32), (), 0)
    known = within_vocabulary(sample, 8)
    assert known.token_ids.tolist() == [0, 1, 0, 3]
    assert within_vocabulary(sample, 10) is sample
    (scored,) = without_unknown([ScoredTokens(np.full(4, -1, np.float32), np.zeros(4, np.float32))], [sample], 8)
    assert scored.logprobs.tolist() == [-1, -1, -np.inf, -1]


def test_a_teacher_needs_no_setting_of_the_policys_start() -> None:
    settings: ExperimentConfig = toy.config(teacher={"path": "~/models/teacher", "tiny": {"seed": 3}})
    teacher = settings.algorithm.teacher
    assert teacher is not None
    assert teacher.model.path == str(Path("~/models/teacher").expanduser())
    assert teacher.model.tiny == TinyModelConfig(seed=3)


# --- which models can be a teacher ---


def check(policy: Path, teacher: Path) -> None:
    require_same_tokens(policy, teacher, trust_policy=False, trust_teacher=False)


def text_folder(folder: Path, tokenizer: Any, vocabulary: int | None = None) -> Path:
    """A text model's folder, as far as the comparison of tokens reads it."""
    model = build_text_model(tokenizer, seed=0)
    model.config.vocab_size = vocabulary or model.config.vocab_size
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_teacher_with_other_weights_or_more_logits_is_accepted(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    check(tiny_model, other_model)
    tokenizer = build_text_tokenizer()
    small, padded = (text_folder(tmp_path / str(n), tokenizer, len(tokenizer) + n) for n in (0, 64))
    check(small, padded)
    check(padded, small)


def test_a_teacher_with_other_tokens_is_refused_with_the_tokens_that_differ(tmp_path: Path) -> None:
    plain, other = build_text_tokenizer(), build_text_tokenizer()
    other.add_tokens(["<tool>"])
    policy, teacher = text_folder(tmp_path / "policy", plain), text_folder(tmp_path / "teacher", other)
    with pytest.raises(
        ModelError, match=f"different tokens: 1 of {len(plain)} and .*'<tool>' \\(None and {len(plain)}"
    ):
        check(policy, teacher)


def test_a_teacher_with_fewer_logits_than_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = build_text_tokenizer()
    policy, teacher = (
        text_folder(tmp_path / name, tokenizer, size) for name, size in (("policy", None), ("teacher", 100))
    )
    with pytest.raises(ModelError, match="has 100 logits"):
        check(policy, teacher)


def test_a_teacher_that_reads_images_otherwise_or_not_at_all_is_refused(
    tiny_model: Path, deepstack_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"read images differently: .*patch_size \(14 and 16\)"):
        check(tiny_model, deepstack_model)
    blind = text_folder(tmp_path / "blind", build_processor(None).tokenizer)
    with pytest.raises(ModelError, match="takes images, and the teacher .* takes none"):
        check(tiny_model, blind)
    check(blind, tiny_model)  # a policy of text and a teacher that could also see


def test_processors_that_cut_other_tiles_read_images_otherwise() -> None:
    own, other = build_processor("idefics3"), build_processor("idefics3")
    assert _reading(own) == _reading(other)
    other.image_processor.max_image_size = {"longest_edge": 42}
    assert {name for name, value in _reading(own).items() if _reading(other)[name] != value} == {"tile"}


def test_the_job_that_fetches_a_teacher_compares_it_with_the_policy(
    tiny_model: Path, other_model: Path, deepstack_model: Path, tmp_path: Path
) -> None:
    pupil = ModelRef(path=str(tiny_model), digest="", source="", num_parameters=1)
    spec = BootstrapSpec(result=tmp_path / "r", model=ModelConfig(path=str(other_model)), models_dir=tmp_path)
    spec = spec.model_copy(update={"pupil": pupil})
    assert bootstrap(spec).path == str(other_model)
    with pytest.raises(ModelError, match="read images differently"):
        bootstrap(spec.model_copy(update={"model": ModelConfig(path=str(deepstack_model))}))
