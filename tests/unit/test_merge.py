import copy
import json
import multiprocessing
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from rlcore.artifacts import CheckpointRef, ModelRef
from rlcore.config import LoraConfig, ModelConfig
from rlcore.data.probe import ProbeSequence, read_probe
from rlcore.errors import CheckpointError, ModelError
from rlcore.files import folder_digest
from rlcore.jobs.merge import VERIFIED, VerifyReport, merge_checkpoint, merge_once, verify_merged
from rlcore.models.comparison import allowed_differences
from rlcore.models.loading import load_hf_model
from rlcore.models.lora import choose_trainable, draw_adapters
from rlcore.models.optimizer import KahanAdamW
from rlcore.segment.spec import SegmentEnd
from rlcore.segment.store import LocalCheckpointStore
from rlcore.types import ImageRef
from tests.train_states import save_train_state

IMAGE_TOKEN = 60
PIXELS = {"min_pixels": 28 * 28, "max_pixels": 84 * 84}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform, so that a wrong weight shows
}


PICTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"fullatt_block_indexes": [1], "window_size": 56},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25, "patch_size": 14},
    ),
}


def _no_image(image: ImageRef) -> Image.Image:
    raise AssertionError("this model reads no images")


def _picture(image: ImageRef) -> Image.Image:
    return Image.linear_gradient("L").resize((image.width, image.height)).convert("RGB")


def _text_model(*, tied: bool) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**TEXT, tie_word_embeddings=tied))


def _vision_model(model_type: str = "qwen2_5_vl") -> PreTrainedModel:
    make_config, make_model, own = PICTURES[model_type]
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "initializer_range": 0.3,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = make_config(
        text_config=TEXT | {"rope_parameters": rope, "head_dim": 16},
        vision_config=vision | own,
        image_token_id=IMAGE_TOKEN,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
        tie_word_embeddings=False,
    )
    return make_model(config)


def _base(folder: Path, model: torch.nn.Module) -> Path:
    """A model folder as from a hub: weights (which must not leak), generation config, tokenizer files."""
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=[1, 2])
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    Qwen2VLImageProcessor().save_pretrained(folder)
    return folder


def _trained(model: torch.nn.Module) -> torch.nn.Module:
    """The base after some training: every value differs."""
    policy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy.eval()


@pytest.fixture
def saved(tmp_path):
    """model -> (policy, checkpoint, base), all of it on disk."""

    def save(model):
        torch.manual_seed(0)
        base = _base(tmp_path / "base", model)
        policy = _trained(model)
        checkpoint = tmp_path / "checkpoint"
        save_train_state(policy, torch.optim.AdamW(policy.parameters()), checkpoint)
        return policy, checkpoint, base

    return save


def _write_probe(folder: Path, sequences: list[ProbeSequence]) -> Path:
    path = folder / "canary.json"
    path.write_text(json.dumps({"sequences": [sequence.model_dump(mode="json") for sequence in sequences]}))
    return path


def _text_probe(policy: torch.nn.Module, folder: Path) -> Path:
    """What the live trainer would write, by hand: the row of token t - 1 holds log p(token t)."""
    tokens = torch.tensor([5, 9, 3, 17, 40, 2])
    with torch.no_grad():
        rows = policy(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    logprobs = [float(rows[t - 1, tokens[t]]) for t in range(3, 6)]
    probe = ProbeSequence(token_ids=tokens.tolist(), completion_start=3, images=(), logprobs=logprobs)
    return _write_probe(folder, [probe])


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_text_model_is_the_policy(tmp_path, saved, tied):
    policy, checkpoint, base = saved(_text_model(tied=tied))
    out = tmp_path / "merged"
    assert merge_checkpoint(checkpoint, base, out) == sum(p.numel() for p in policy.parameters())
    merged = load_hf_model(out, torch.float32)
    for name, value in policy.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    assert merged.generation_config.eos_token_id == [1, 2]
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    report = verify_merged(
        out, _text_probe(policy, checkpoint), log_prob_with_vllm=None, read_image=_no_image, **PIXELS
    )
    assert (report.num_sequences, report.num_tokens, report.vllm_max_delta) == (1, 3, None)
    assert report.transformers_max_delta < 1e-5


@pytest.mark.parametrize("model_type", PICTURES)
def test_a_merged_vision_model_is_the_policy_with_images_and_without(tmp_path, saved, model_type):
    policy, checkpoint, base = saved(_vision_model(model_type))
    out = tmp_path / "merged"
    merge_checkpoint(checkpoint, base, out)
    image = ImageRef("a" * 64, width=56, height=28)  # 2 merged patches
    inputs = Qwen2VLImageProcessor()(
        images=[_picture(image)],
        size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84},
        return_tensors="pt",
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    tokens = torch.tensor([[5, 62, IMAGE_TOKEN, IMAGE_TOKEN, 63, 8, 30, 31, 2]])
    with torch.no_grad():
        rows = (
            policy(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=(tokens == IMAGE_TOKEN).int(),
                **inputs,
            )
            .logits[0]
            .log_softmax(-1)
        )
    logprobs = [float(rows[t - 1, tokens[0, t]]) for t in range(6, 9)]
    with_image = ProbeSequence(token_ids=tokens[0].tolist(), completion_start=6, images=(image,), logprobs=logprobs)
    text = read_probe(_text_probe(policy, checkpoint))
    probe = _write_probe(checkpoint, [with_image, *text])
    verify = partial(verify_merged, out, probe, log_prob_with_vllm=None, **PIXELS)
    report = verify(read_image=_picture)
    assert (report.num_sequences, report.num_tokens) == (2, 6)
    assert report.transformers_max_delta < 1e-5
    with pytest.raises(ModelError, match="Sequence 0, completion token"):  # the picture is looked at
        verify(read_image=lambda image: Image.new("RGB", (image.width, image.height)))


def test_a_merged_adapter_is_held_to_the_policys_probe(tmp_path):
    torch.manual_seed(0)
    policy = _text_model(tied=True)
    base = _base(tmp_path / "base", policy)
    choose_trainable(policy, ModelConfig(lora=LoraConfig(rank=4, alpha=8)))
    policy.load_state_dict(draw_adapters(policy, 0), strict=False, assign=True)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.normal_(std=0.3)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "merged"
    save_train_state(policy, torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad]), checkpoint)
    probe = _text_probe(policy, checkpoint)
    merge_checkpoint(checkpoint, base, out)
    verify = partial(verify_merged, probe=probe, log_prob_with_vllm=None, read_image=_no_image, **PIXELS)
    assert verify(out).transformers_max_delta < 1e-5
    with pytest.raises(ModelError, match="those of the trainer differ"):
        verify(base)
    other = _base(tmp_path / "other", Qwen2ForCausalLM(Qwen2Config(**TEXT | {"hidden_size": 64})))
    with pytest.raises(CheckpointError, match="does not fit the architecture"):
        merge_checkpoint(checkpoint, other, tmp_path / "wrong")


def test_a_checkpoint_in_bfloat16_becomes_a_model_in_float32(tmp_path):
    torch.manual_seed(0)
    model = _text_model(tied=True)
    base = _base(tmp_path / "base", model)
    policy = _trained(model).bfloat16()
    save_train_state(policy, KahanAdamW(policy.parameters(), lr=0.1), tmp_path / "checkpoint")
    merge_checkpoint(tmp_path / "checkpoint", base, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.float32}
    assert all(torch.equal(value, policy.state_dict()[name].float()) for name, value in merged.items())


def test_the_tolerance_is_so_many_times_what_correct_passes_differ_by() -> None:
    assert allowed_differences([]) == (1e-3, 1e-3)
    passes = [np.array([0.03, -0.04]), np.array([0.0, 0.05])]  # root mean square: sqrt(0.005 / 4)
    largest, spread = allowed_differences(passes)
    assert largest == pytest.approx(6 * 0.00125**0.5)
    assert spread == pytest.approx(2 * 0.00125**0.5)
    with_a_tail, _ = allowed_differences([np.array([0.5, *[0.0] * 99])])
    assert with_a_tail == pytest.approx(2 * 0.5)  # 6 times the root mean square are 0.3


@pytest.mark.parametrize(("scale", "fine"), [(1.0, True), (1.1, False)])
def test_a_policy_in_bfloat16_is_held_to_the_rounding_of_bfloat16(tmp_path, saved, scale, fine):
    """One layer that is 10 % too large differs by more than rounding does."""
    policy, checkpoint, base = saved(_text_model(tied=True))
    out = tmp_path / "merged"
    merge_checkpoint(checkpoint, base, out)
    with torch.no_grad():
        policy.model.layers[0].mlp.down_proj.weight.mul_(scale)
    probe = _text_probe(policy.bfloat16(), checkpoint)
    verify = partial(
        verify_merged, out, probe, log_prob_with_vllm=None, read_image=_no_image, dtype=torch.bfloat16, **PIXELS
    )
    if fine:
        report = verify()
        assert 0 < report.transformers_max_delta <= report.allowed_max
    else:
        with pytest.raises(ModelError, match="those of the trainer differ"):
            verify()


def test_another_model_does_not_verify_and_the_numbers_are_given(tmp_path, saved):
    policy, checkpoint, base = saved(_text_model(tied=True))
    probe = _text_probe(policy, checkpoint)
    with pytest.raises(ModelError, match=r"those of the trainer differ by .* nats .*allowed are 0.001"):
        verify_merged(base, probe, log_prob_with_vllm=None, read_image=_no_image, **PIXELS)


@pytest.mark.parametrize(("shift", "fine"), [(0.0, True), (9e-4, True), (2e-3, False), (float("nan"), False)])
def test_vllm_is_held_to_the_same_probe(tmp_path, saved, shift, fine):
    policy, checkpoint, base = saved(_text_model(tied=True))
    out = tmp_path / "merged"
    merge_checkpoint(checkpoint, base, out)
    probe = _text_probe(policy, checkpoint)

    def with_vllm(model_dir: Path, sequences: list[ProbeSequence]) -> list[list[float]]:
        assert model_dir == out
        return [[*sequence.logprobs[:-1], sequence.logprobs[-1] + shift] for sequence in sequences]

    verify = partial(verify_merged, out, probe, log_prob_with_vllm=with_vllm, read_image=_no_image, **PIXELS)
    if fine:
        assert verify().vllm_max_delta == pytest.approx(shift, abs=1e-5)
    else:
        with pytest.raises(ModelError, match="those of vLLM differ .* Sequence 0, completion token 2"):
            verify()


def test_a_checkpoint_of_another_architecture_is_refused_by_name(tmp_path, saved):
    _, checkpoint, _ = saved(_text_model(tied=True))
    other = _base(tmp_path / "other", Qwen2ForCausalLM(Qwen2Config(**TEXT | {"num_hidden_layers": 1})))
    with pytest.raises(CheckpointError, match=r"missing lm_head.weight; unexpected model.layers.1"):
        merge_checkpoint(checkpoint, other, tmp_path / "merged")
    wider = _base(tmp_path / "wider", Qwen2ForCausalLM(Qwen2Config(**TEXT | {"vocab_size": 65})))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight \(64, 32\) instead of \(65, 32\)"):
        merge_checkpoint(checkpoint, wider, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_empty_or_missing_probe_verifies_nothing(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_probe(tmp_path / "canary.json")
    empty = ProbeSequence(token_ids=(1, 2), completion_start=2, images=(), logprobs=())
    with pytest.raises(ModelError, match="holds no log-probs"):
        read_probe(_write_probe(tmp_path, [empty]))


@pytest.fixture
def commit(tmp_path):
    """step -> a committed checkpoint of the model in ``tmp_path / "base"``, trained anew."""
    torch.manual_seed(0)
    model = _text_model(tied=True)
    _base(tmp_path / "base", model)
    store = LocalCheckpointStore(tmp_path / "run", "run")

    def committed(step: int) -> CheckpointRef:
        staging = store.stage(step)
        policy = _trained(model)
        save_train_state(policy, torch.optim.AdamW(policy.parameters()), staging)
        return store.commit(
            staging,
            step=step,
            end=SegmentEnd(0, 0, complete=True),
            experiment_digest="e",
            dataset_digest="d",
            model_digest="m",
            trainer_state={},
        )

    return committed


def _as_ref(base: Path) -> ModelRef:
    return ModelRef(path=str(base), digest="d", source="hub", num_parameters=1)


EQUAL = VerifyReport(num_sequences=1, num_tokens=1, transformers_max_delta=0.0, vllm_max_delta=0.0)


def _merge_at_once(folder: Path, checkpoint: CheckpointRef, barrier, results) -> None:
    """Verify while the other process verifies as well."""
    out = folder / "models" / "merged"

    def verify(model: Path) -> VerifyReport:
        barrier.wait()
        assert (model / "model.safetensors").exists()
        assert not (out / VERIFIED).exists()
        barrier.wait()
        return EQUAL

    results.put(merge_once(checkpoint, _as_ref(folder / "base"), out, verify))


def test_two_merges_of_one_checkpoint_at_once_make_one_whole_model(tmp_path, commit):
    """The flow's own and that of a promotion, on one volume."""
    checkpoint, out = commit(1), tmp_path / "models" / "merged"
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2, timeout=60), context.Queue()
    arguments = (tmp_path, checkpoint, barrier, results)
    mergers = [context.Process(target=_merge_at_once, args=arguments) for _ in range(2)]
    for merger in mergers:
        merger.start()
    for merger in mergers:
        merger.join()
    assert [merger.exitcode for merger in mergers] == [0, 0]
    first, second = results.get(timeout=10), results.get(timeout=10)
    assert first == second
    assert first.path == str(out)
    assert folder_digest(out) == first.digest
    assert [path.name for path in out.parent.iterdir()] == ["merged"]


def test_a_model_is_merged_once_and_only_a_verified_one_counts(tmp_path, commit):
    base = _as_ref(tmp_path / "base")
    asked: list[Path] = []

    def verify(out: Path) -> VerifyReport:
        asked.append(out)
        if len(asked) == 1:
            raise ModelError("not this time")
        return EQUAL

    first, out = commit(1), tmp_path / "models" / "merged"
    with pytest.raises(ModelError, match="not this time"):
        merge_once(first, base, out, verify)
    assert not out.exists()
    out.mkdir()
    (out / "left").write_text("by a version that verified in place, and failed")
    ref = merge_once(first, base, out, verify)
    assert (ref.path, ref.source) == (str(out), "run step 1 (hub)")
    assert not (out / "left").exists()
    assert merge_once(first, base, out, verify) == ref
    assert len(asked) == 2  # the third call found the verified one
    second = commit(2)
    assert merge_once(second, base, out, verify).digest != ref.digest  # same folder, another checkpoint
    assert len(asked) == 3
    shard = next((Path(second.path) / "train_state").glob("*.distcp"))
    shard.write_bytes(b"")
    shutil.rmtree(out)
    with pytest.raises(CheckpointError, match="distcp"):
        merge_once(second, base, out, verify)


def test_a_model_folder_is_loaded_whole_or_not_at_all(tmp_path):
    base = _base(tmp_path / "base", _text_model(tied=False))
    assert load_hf_model(base, torch.bfloat16).dtype == torch.bfloat16
    assert load_hf_model(base, torch.float32, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ModelError, match="no config.json"):
        load_hf_model(tmp_path, torch.float32)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))  # layer_types says 2
    with pytest.raises(ModelError, match="num_hidden_layers"):
        load_hf_model(base, torch.float32)
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ModelError, match=r"missing_keys: \['model.layers.2"):
        load_hf_model(base, torch.float32)
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(ModelError, match="mismatched_keys"):
        load_hf_model(base, torch.float32)
    (base / "config.json").write_text(json.dumps(config | {"model_type": "no-such-type"}))
    with pytest.raises(ModelError, match="no-such-type"):
        load_hf_model(base, torch.float32)
    (base / "config.json").write_text(json.dumps(config))
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="unreadable|cannot be read"):
        load_hf_model(base, torch.float32)
    weights.unlink()
    with pytest.raises(ModelError, match=r"found \['pytorch_model.bin'\], allowed are"):
        load_hf_model(base, torch.float32)


def test_weights_are_saved_under_the_names_of_the_base(tmp_path, saved):
    _, checkpoint, base = saved(_vision_model())
    merge_checkpoint(checkpoint, base, tmp_path / "merged")
    merged, original = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    assert merged.keys() == original.keys()
    assert not any(torch.equal(merged[name], original[name]) for name in merged)


def test_logprobs_are_the_completions_alone(tmp_path, saved):
    policy, checkpoint, base = saved(_text_model(tied=True))
    probe, allowed = _text_probe(policy, checkpoint), float("inf")
    report = verify_merged(base, probe, log_prob_with_vllm=None, read_image=_no_image, tolerance=allowed, **PIXELS)
    assert (report.num_sequences, report.num_tokens) == (1, 3)
