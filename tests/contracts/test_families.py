"""Model families: known to ``rlcore/families/`` alone, and asked without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.errors import ModelError
from rlcore.families import FAMILIES, REFUSED, family_in, family_of, images_in, images_of, is_of_tower

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "qwen|llama|mistral|mixtral|phi-?[34]|gemma|cohere|granite|olmo|llava|internvl|smolvlm|idefics|glm.?4|kimi.?vl|"
    "deepseek"
)
INSIDES = r"vision_config|spatial_merge|\.visual\b|deepstack|mrope"
COMPARISON = r"model_type\b.{0,20}?(==|!=|\bin\b|startswith)|(==|!=|\bin\b|match) *(\w+\.)?model_type"
KNOWLEDGE = re.compile(f"{NAMES}|{INSIDES}|{COMPARISON}", re.IGNORECASE)
SETTINGS = "rlcore/config/policy.py"
# The embedded policies are built from transformers' own classes.
BUILD_ONE = ("rlcore/models/tiny.py", "rlcore/data/tiny.py")
CHOOSE_ONE = '    "qwen2_vl", "qwen2_5_vl", ', '    """Architecture of the policy'  # model.tiny.family


def knowledge_of_families(path: str, text: str) -> Iterator[str]:
    if not path.startswith("rlcore/families/") and path not in BUILD_ONE:
        for number, line in enumerate(text.splitlines(), start=1):
            if (match := KNOWLEDGE.search(line)) and not (path == SETTINGS and line.startswith(CHOOSE_ONE)):
                yield f"{path}:{number}: {match[0]}"


def test_no_other_file_knows_a_family() -> None:
    found = [
        place
        for package in ("rlcore", "tasks", "infra", "flows")
        for path in sorted((ROOT / package).rglob("*.py"))
        for place in knowledge_of_families(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'if config.model_type == "mamba":',
        'if config.model_type in ("mamba",):',
        'if "mamba" == model_type:',
        "match config.model_type:",
        'if model_type.startswith("mamba"):',
        "from transformers import Qwen2Config",
        "hf.model.visual(pixels)",
        "config.vision_config.patch_size",
    ],
)
def test_knowledge_of_a_family_is_found(line: str) -> None:
    assert list(knowledge_of_families("rlcore/models/packed.py", line))
    assert not list(knowledge_of_families("rlcore/families/qwen2.py", line))


def test_families_answer_without_torch() -> None:
    code = """
import json, sys
from types import SimpleNamespace
from rlcore.families import FAMILIES, PLACEHOLDERS
sizes = []
for family in {id(f.images): f for f in FAMILIES.values() if f.images}.values():
    tiles = {"size": {"height": 28, "longest_edge": 112}, "min_patches": 1, "max_patches": 12}
    tiles["max_image_size"] = {"longest_edge": 28}
    processor = SimpleNamespace(image_processor=SimpleNamespace(patch_size=14, merge_size=2, **tiles))
    square = family.images.processors[0].startswith("Idefics")
    sides = {"image_size": 28, "patch_size": 14} if square else {"image_size": (28, 28), "patch_size": (14, 14)}
    vision = SimpleNamespace(spatial_merge_size=2, **sides)
    counts = {"downsample_ratio": 0.5, "scale_factor": 2, "mm_tokens_per_image": 4}
    config = SimpleNamespace(image_token_id=1, vision_config=vision, **counts)
    rule = family.images.resizing(processor)
    sizes.append((rule.target_size(487, 427, 3136, 2**20), family.images.layout(config).num_rows((1, 4, 6))))
print(json.dumps([sizes, len(PLACEHOLDERS), [n for n in ("torch", "transformers", "vllm") if n in sys.modules]]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(answer.stdout) == [
        [[[476, 420], 6]] * 4 + [[[84, 84], 1], [[112, 112], 1], [[28, 28], 4]],
        21,
        [],
    ]


def test_an_unsupported_family_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match=r"'mamba'.* Supported are qwen2, .*docs/howto/own-family\.md"):
        family_in(tmp_path)
    with pytest.raises(ModelError, match="model_type None"):
        family_of({})


def test_a_family_that_was_tried_is_refused_with_what_is_missing() -> None:
    assert not REFUSED.keys() & FAMILIES.keys()
    for model_type, missing in REFUSED.items():
        with pytest.raises(ModelError, match=re.escape(f"'{model_type}', which is refused: {missing}. Supported are ")):
            family_of({"model_type": model_type})


def test_a_text_model_of_any_type_can_be_sampled_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert images_in(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "vision_config": {}}')
    with pytest.raises(ModelError, match="'mamba'"):
        images_in(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert images_in(tmp_path) is FAMILIES["qwen2_vl"].images


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        family_in(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json is no JSON object"):
        family_in(tmp_path)


def test_an_unknown_image_processor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"object is the image processor of no supported family"):
        images_of(object())


def test_families_with_the_same_image_processor_have_the_same_rule_of_sizes_and_tokens() -> None:
    rules: dict[str, type] = {}
    loaded = SimpleNamespace(image_processor=SimpleNamespace(patch_size=16, merge_size=2))
    for family in FAMILIES.values():
        for processor in () if family.images is None else family.images.processors:
            rule = type(family.images.resizing(loaded))
            assert rules.setdefault(processor, rule) == rule


def test_every_vision_language_family_names_what_it_owns() -> None:
    for model_type, family in FAMILIES.items():
        if family.images is not None:
            assert family.images.processors, model_type
            assert family.images.placeholders, model_type
    assert is_of_tower("model.visual.blocks.0.attn.proj.weight")
    assert is_of_tower("visual.merger.mlp.0.weight")  # a folder of older transformers
    assert is_of_tower("model.visual.deepstack_merger_list.2.linear_fc1.weight")
    assert is_of_tower("model.vision_tower.encoder.layer.0.attention.q_proj.weight")
    assert is_of_tower("multi_modal_projector.linear_1.weight")
    assert is_of_tower("model.vision_model.encoder.layers.0.self_attn.q_proj.weight")
    assert is_of_tower("model.connector.modality_projection.proj.weight")
    assert not is_of_tower("model.layers.0.mlp.up_proj.weight")
