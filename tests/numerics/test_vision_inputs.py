"""The tower with its index arithmetic done beforehand against the tower that does it itself."""

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from rlcore.families import qwen2_vl, qwen3_vl
from rlcore.families.protocol import Images
from rlcore.models.attention import use_packed_attention
from rlcore.models.vision import tower_arguments


def tower(kind: str) -> tuple[Images, torch.nn.Module]:
    torch.manual_seed(0)
    if kind == "deepstack":
        width = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 16, "num_position_embeddings": 49}
        config = Qwen3VLConfig(vision_config={"depth": 3, "num_heads": 2, "deepstack_visual_indexes": [0, 2], **width})
        return qwen3_vl.FAMILY.images, Qwen3VLVisionModel(config.vision_config)
    if kind == "windows":
        width = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(vision_config={"depth": 3, "num_heads": 2, "window_size": 112, **width})
        return qwen2_vl.IMAGES, Qwen2_5_VisionTransformerPretrainedModel(config.vision_config)
    config = Qwen2VLConfig(vision_config={"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 16})
    return qwen2_vl.IMAGES, Qwen2VisionTransformerPretrainedModel(config.vision_config)


@pytest.mark.parametrize("kind", ["windows", "no windows", "deepstack"])
@pytest.mark.parametrize("grids", [[[1, 12, 20]], [[1, 4, 4], [2, 10, 6], [1, 2, 2]]])
def test_the_features_are_the_same_to_the_last_bit(kind, grids):
    images, model = tower(kind)
    use_packed_attention(model)
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * model.config.patch_size**2)
    arguments = tower_arguments(images, model.config, grid, torch.device("cpu"))
    with torch.no_grad():
        output = model(pixels, grid_thw=grid)
        expected = torch.cat([output.pooler_output, *getattr(output, "deepstack_features", [])], -1)
        assert torch.equal(images.features(model(pixels, **arguments)), expected)
