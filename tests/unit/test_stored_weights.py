"""Weights that are read tensor by tensor are those that transformers loads, whole and in rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlcore.errors import ModelError
from rlcore.models.loading import auto_class, empty_hf_model, load_hf_config, stores_buffers
from rlcore.models.sharding import transformer_blocks
from rlcore.models.stored_weights import StoredWeights, load_shards, write_shards
from tests.checking import make_model
from tests.downloaded import make_downloaded
from tests.ranks import on_ranks, whole

MAKERS: dict[str, Callable[[Path], Path]] = {
    "text": lambda folder: make_downloaded(folder, "tiny-text"),
    "text, newer": lambda folder: make_downloaded(folder, "tiny-text", rope_keys="newer"),
    "vl": lambda folder: make_downloaded(folder, "tiny-vl"),
    "vl, newer": lambda folder: make_downloaded(folder, "tiny-vl", rope_keys="newer"),
    "experts": lambda folder: make_model(folder, "qwen3_moe"),  # transformers stacks the files' experts
    "experts, transposed": lambda folder: make_model(folder, "qwen3_vl_moe"),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("stored") / "model")


def _loaded(folder: Path) -> Any:
    return auto_class(load_hf_config(folder)).from_pretrained(folder, dtype=torch.float32)


def _files(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_each_tensor_and_its_rows_are_those_that_transformers_loads(folder: Path) -> None:
    stored, expected = StoredWeights(folder, empty_hf_model(folder)), _loaded(folder).state_dict()
    for name, value in expected.items():
        assert torch.equal(stored.read(name).float(), value), name
        rows = len(value)
        for part in (slice(0, rows // 2), slice(rows // 2, rows), slice(rows, rows)):
            assert torch.equal(stored.read(name, part).float(), value[part]), (name, part)


@pytest.mark.parametrize("kind", ["text", "text, newer", "vl", "vl, newer"])
def test_buffers_have_the_values_that_transformers_gives_them(tmp_path: Path, kind: str) -> None:
    folder = MAKERS[kind](tmp_path / "model")
    empty, expected = empty_hf_model(folder), _loaded(folder)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in empty.parameters())
    found = dict(empty.named_buffers())
    assert found
    assert found.keys() == dict(expected.named_buffers()).keys()
    for name, value in expected.named_buffers():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 40])
def test_buckets_hold_each_tensor_once_and_go_back_to_the_files_layout(folder: Path, bucket_bytes: int) -> None:
    stored = StoredWeights(folder, empty_hf_model(folder))
    written: dict[str, Tensor] = {}
    for names in stored.buckets(bucket_bytes, torch.float32):
        again = stored.as_stored({name: stored.read(name) for name in names})
        assert not written.keys() & again.keys()
        written |= again
    expected = _files(folder)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(written[name], value), name


def _rank(rank: int, world: int, folder: str) -> None:
    hf: Any = empty_hf_model(Path(folder))
    stored, elements = StoredWeights(Path(folder), hf), 0
    mesh = init_device_mesh("cpu", (world,))
    for block in transformer_blocks(hf):
        fully_shard(block, mesh=mesh)
    fully_shard(hf, mesh=mesh)

    def read(name: str, rows: slice) -> Tensor:
        nonlocal elements
        values = stored.read(name, rows)
        elements += values.numel()
        return values

    load_shards(hf, hf, read, torch.device("cpu"))
    read_back = {name: whole(value) for name, value in hf.state_dict().items()}
    expected = _loaded(Path(folder))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in read_back.items())
    total = sum(parameter.numel() for parameter in expected.parameters())
    assert elements < 1.1 * total / world  # each rank reads its own rows; the last rank of odd sizes has fewer
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(hf(input_ids=tokens).logits, expected.eval()(input_ids=tokens).logits)
    hf(input_ids=tokens).logits.square().mean().backward()
    assert all(parameter.grad is not None for name, parameter in hf.named_parameters() if "visual" not in name)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["text", "vl"])
def test_each_rank_reads_its_own_rows_alone(tmp_path: Path, kind: str, world: int) -> None:
    on_ranks(world, _rank, str(MAKERS[kind](tmp_path / "model")))


def test_a_folder_whose_tensors_are_not_those_of_its_config_is_refused(tmp_path: Path) -> None:
    folder = MAKERS["text"](tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"vocab_size": 700}))
    with pytest.raises(ModelError, match=r"mismatched_keys: .*\(640, 128\) instead of \(700, 128\)"):
        StoredWeights(folder, empty_hf_model(folder))
    (folder / "config.json").write_text(json.dumps(text | {"num_hidden_layers": 3, "max_window_layers": 3}))
    with pytest.raises(ModelError, match=r"missing_keys: \['model.layers.2"):
        StoredWeights(folder, empty_hf_model(folder))


def test_buffers_of_the_files_are_told_from_computed_ones() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("computed", torch.ones(1), persistent=False)
    assert not stores_buffers(model)
    model.register_buffer("stored", torch.ones(1))
    assert stores_buffers(model)


def test_experts_are_written_as_published_also_where_the_folder_has_transformers_own_layout(tmp_path: Path) -> None:
    """Six experts from 64 to 2 x 96 and back. transformers 5.19 saves them as [experts, out, in], and vLLM loads
    [experts, in, out]."""
    published, own = make_model(tmp_path / "published", "qwen3_vl_moe"), tmp_path / "own"
    _loaded(published).save_pretrained(own)
    load_hf_config(published).save_pretrained(own)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert [tuple(_files(folder)[name].shape) for folder in (published, own)] == [(6, 64, 192), (6, 192, 64)]
    stored = StoredWeights(own, empty_hf_model(own))
    write_shards(
        ({name: stored.read(name) for name in bucket} for bucket in stored.buckets(1, torch.float32)), stored, tmp_path
    )
    expected, written = _files(published), _files(tmp_path)
    assert written.keys() == expected.keys()
    assert all(torch.equal(value, written[name]) for name, value in expected.items())
