"""A load that is watched once and repeated by its copies puts every element where the loaders would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from rlcore.config import RolloutConfig
from rlcore.data.tiny import build_text_tokenizer
from rlcore.errors import SamplerError
from rlcore.sampler import weights
from rlcore.sampler.start import capture_sizes, graphs_with_adapter, one_tokenizer, warmed_up_as_sampled
from rlcore.sampler.weights import Parts, WeightLoader, checksum, replay_load, watched_load


class Fused(nn.Module):
    """Loads the way vLLM's layers do: q, k, v into slices of one parameter, a padded and tied embedding, a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(10, 6, dtype=torch.bfloat16))
        self.embedding = nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))
        self.patch = nn.Parameter(torch.zeros(4, 12, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.zeros(2, 6, 3, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rows = {"q": (0, 6), "k": (6, 2), "v": (8, 2)}
        for name, value in weights:
            if name in rows:
                self.qkv.data.narrow(0, *rows[name]).copy_(value)
            elif name == "embedding":
                self.embedding[: len(value)].data.copy_(value)
            elif name == "patch":
                self.patch.data.copy_(value.view(4, 12))
            elif name == "experts":  # one source, two copies, each transposed
                for expert in range(2):
                    self.experts.data[expert].copy_(value[expert].t())
            # lm_head: tied, left out


def tensors(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 6), "k": (2, 6), "v": (2, 6), "embedding": (7, 6), "patch": (4, 3, 2, 2), "experts": (2, 3, 6)}
    found = [(name, torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()]
    return [*found, ("lm_head", found[3][1])]


def test_a_repeated_load_equals_a_load() -> None:
    model, plain = Fused(), Fused()
    copies = watched_load(model, iter(tensors(0)))
    plain.load_weights(tensors(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    plain.load_weights(tensors(1))
    addresses = [p.data_ptr() for p in model.parameters()]
    for bucket_bytes in (1, 1 << 30):
        replay_load(copies, iter(tensors(1)), bucket_bytes)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == addresses


class Headless(nn.Module):
    """Computes logits with its embeddings, and refuses a head by its name, as vLLM's Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(7, 6)})

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in weights:
            self.get_parameter(name).data.copy_(value)


class Headed(Headless):
    """Has a head by name, which is the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self.model["embed_tokens"]


class OneRank:
    """An engine of one rank, as the loader calls it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def apply_model(self, call: Callable[[nn.Module], object]) -> list[object]:
        return [call(self.model)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [Headless, Headed])
def test_a_tied_head_that_the_engine_lacks_is_not_loaded_and_counts_in_the_checksum(
    kind: type[Headless], together: bool
) -> None:
    model = kind()
    loader = WeightLoader(OneRank(model), "cuda", Parts(lambda places: [places]) if together else None)
    for seed in (0, 1):  # watched, then repeated
        value = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
        loaded = loader.load(iter([("model.embed_tokens.weight", value), ("lm_head.weight", value)]))
        assert torch.equal(model.model["embed_tokens"].weight, value)
        assert loaded.due == loaded.sent == checksum([value, value])


def test_a_head_of_its_own_that_the_engine_lacks_is_noticed() -> None:
    embeddings, head = (torch.randn(7, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    weights = [("model.embed_tokens.weight", embeddings), ("lm_head.weight", head)]
    loaded = WeightLoader(OneRank(Headless()), "cuda", None).load(iter(weights))
    assert loaded.due != checksum([embeddings, embeddings])  # what the engine holds
    with pytest.raises(SamplerError, match=r"42 of the 42 elements of lm_head\.weight were taken by no rank"):
        WeightLoader(OneRank(Headless()), "cuda", Parts(lambda places: [places])).load(iter(weights))


def test_a_repeated_load_accepts_sources_at_other_addresses() -> None:
    """As they come out of a packed all-gather: views into one buffer; or not contiguous, as no loader saw them."""
    model, plain = Fused(), Fused()
    copies = watched_load(model, iter(tensors(0)))
    flat = torch.cat([value.flatten() for _, value in tensors(2)])
    views, offset = [], 0
    for name, value in tensors(2):
        views.append((name, flat[offset : offset + value.numel()].view(value.shape)))
        offset += value.numel()
    views[1] = ("k", views[1][1].t().contiguous().t())
    replay_load(copies, iter(views), 100)
    plain.load_weights(tensors(2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_large_tensor_is_summed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    expected = sum(value.view(torch.int16).flatten().tolist())
    pieces: list[int] = []
    stack = torch.stack

    def counted(parts: list[Tensor]) -> Tensor:
        pieces.append(len(parts))
        return stack(parts)

    monkeypatch.setattr(weights, "_SUMMED_AT_ONCE", 11)  # two rows
    monkeypatch.setattr(torch, "stack", counted)
    assert int(weights.bit_sum(value)) == expected
    assert pieces == [4]
    monkeypatch.setattr(weights, "_SUMMED_AT_ONCE", 3)  # less than a row: one row at once
    assert int(weights.bit_sum(value)) == expected
    assert int(weights.bit_sum(torch.zeros(0, 5))) == 0


def test_the_checksum_is_blind_to_layout_and_to_nothing_smaller_than_a_bit() -> None:
    parts = [torch.randn(3, 4), -torch.zeros(2, 4), torch.randn(1, 4)]
    whole = checksum(parts)
    assert checksum([torch.cat([*reversed(parts), torch.zeros(2, 4)])]) == whole
    changed = parts[0].clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    assert checksum([changed, *parts[1:]]) != whole
    assert checksum(part.bfloat16() for part in parts) == checksum([torch.cat(parts).bfloat16()])


def test_graphs_are_recorded_up_to_the_largest_batch() -> None:
    assert capture_sizes(1, in_step=1) == [1]
    assert capture_sizes(20, in_step=80) == [1, 2, 4, 8, 16, 20]
    small = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert capture_sizes(1024, in_step=80) == [*small, 72, 80, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert capture_sizes(300, in_step=48) == [*small, 96, 128, 192, 256, 300]
    sizes = capture_sizes(1000, in_step=1000)
    assert sizes[-1] == 1000
    assert all(above <= below * 9 / 8 for below, above in zip(sizes, sizes[1:], strict=False) if below >= 64)


def test_tokenizers_are_copied_again_once_an_engine_has_started() -> None:
    tokenizer = build_text_tokenizer()
    with one_tokenizer():
        assert copy.deepcopy({"tokenizer": tokenizer})["tokenizer"] is tokenizer
    assert copy.deepcopy(tokenizer) is not tokenizer


def test_an_engine_warms_up_what_the_run_samples_with() -> None:
    from vllm import SamplingParams

    with warmed_up_as_sampled(RolloutConfig(temperature=0.7, top_p=0.9)):
        run = SamplingParams.for_sampler_warmup()
    assert (run.temperature, run.top_p, run.min_p, run.repetition_penalty, run.logprobs) == (0.7, 0.9, 0.0, 1.0, 0)
    of_vllm = SamplingParams.for_sampler_warmup()
    assert (of_vllm.min_p > 0, of_vllm.repetition_penalty > 1) == (True, True), "so leaving features out saves time"


def test_an_engine_with_adapters_captures_graphs_only_for_requests_with_one() -> None:
    from vllm.config import CompilationConfig
    from vllm.config.lora import LoRAConfig
    from vllm.v1.worker.gpu import model_runner

    def captured() -> list[int]:
        """Numbers of adapters in a batch."""
        cases: list[int] = model_runner.get_lora_capture_cases(LoRAConfig(max_loras=1), CompilationConfig())  # type: ignore[attr-defined]
        return cases

    with graphs_with_adapter():
        run = captured()
    of_vllm = captured()
    assert of_vllm == [0, *run], "so leaving batches without an adapter out saves time"
    assert run
