"""The tower with its index arithmetic done beforehand against the tower that does it itself."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from rlcore.families.qwen2_vl import IMAGES
from rlcore.models.attention import use_packed_attention
from rlcore.models.vision import tower_arguments


def tower(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "windows":
        width = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(vision_config={"depth": 3, "num_heads": 2, "window_size": 112, **width})
        return Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)
    config = Qwen2VLConfig(vision_config={"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 16})
    return Qwen2VisionTransformerPretrainedModel(config.vision_config)


@pytest.mark.parametrize("kind", ["windows", "no windows"])
@pytest.mark.parametrize("grids", [[[1, 12, 20]], [[1, 4, 4], [2, 10, 6], [1, 2, 2]]])
def test_the_features_are_the_same_to_the_last_bit(kind, grids):
    model = tower(kind)
    use_packed_attention(model)
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14)
    arguments = tower_arguments(IMAGES, model.config, grid, torch.device("cpu"))
    with torch.no_grad():
        expected = model(pixels, grid_thw=grid).pooler_output
        assert torch.equal(IMAGES.features(model(pixels, **arguments)), expected)
