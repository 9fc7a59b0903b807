import copy
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlcore.errors import CheckpointError, StorageError
from rlcore.models import checkpoint
from rlcore.models.checkpoint import BackgroundSaver, load_train_state, page_locked
from rlcore.models.optimizer import KahanAdamW
from tests.ranks import on_ranks, whole
from tests.train_states import load_full_weights, save_train_state

ELASTIC = [(0, False), (3, False), (0, True), (3, True)]  # steps trained, all in bfloat16
NAMES = {"embed.weight", "block.weight", "block.bias", "unused.weight", "norm", "counter"}


class Tiny(nn.Module):
    """Tied head, odd sizes (rank 1 of 2 gets less, or nothing), an unused parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.block = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 2, bias=False)
        self.norm = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counter", torch.tensor(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm * torch.tanh(self.block(self.embed(tokens))))


def _model(seed: int, *, shard: bool = False, bf16: bool = False) -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tiny().to(torch.bfloat16 if bf16 else torch.float32)
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if bf16:
        return model, KahanAdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), fused=True)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.arange(7).roll(step)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number that training depends on, unsharded, by name."""
    tensors = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = whole(value)
    return tensors


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_one_process_gets_back_every_bit_and_trains_on_the_same(tmp_path, steps, bf16):
    model, optimizer = _model(0, bf16=bf16)
    _train(model, optimizer, steps)
    before = _snapshot(model, optimizer)
    save_train_state(model, optimizer, tmp_path)
    _assert_equal(_snapshot(model, optimizer), before)  # saving changes nothing, at step 0 neither

    other, other_optimizer = _model(1, bf16=bf16)
    _train(other, other_optimizer, 2)  # what was there before is replaced whole
    load_train_state(other, other_optimizer, tmp_path)
    _assert_equal(_snapshot(other, other_optimizer), before)
    assert other.head.weight is other.embed.weight
    assert len(other_optimizer.state) == (4 if steps else 0)  # not for the unused parameter
    _train(model, optimizer, 2)
    _train(other, other_optimizer, 2)
    _assert_equal(_snapshot(other, other_optimizer), _snapshot(model, optimizer))


def _wait(saver: BackgroundSaver) -> None:
    while not saver.done():
        time.sleep(0.001)


class Held:
    """A saver whose thread waits until it is let go."""

    def __init__(self) -> None:
        executor, self.let_go = ThreadPoolExecutor(1), threading.Event()
        executor.submit(self.let_go.wait)
        self.saver = BackgroundSaver(executor)

    def finish(self) -> None:
        self.let_go.set()
        _wait(self.saver)


@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_trained_after_begin_is_not_in_the_save(tmp_path, bf16):
    model, optimizer = _model(0, bf16=bf16)
    _train(model, optimizer, 3)
    before = _snapshot(model, optimizer)
    held = Held()
    held.saver.begin(model, optimizer, tmp_path)
    assert not held.saver.done()
    with pytest.raises(CheckpointError, match="still being written"):
        held.saver.begin(model, optimizer, tmp_path)
    _train(model, optimizer, 2)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    assert not list(tmp_path.iterdir())
    held.finish()
    other, other_optimizer = _model(1, bf16=bf16)
    load_train_state(other, other_optimizer, tmp_path)
    _assert_equal(_snapshot(other, other_optimizer), before)


def test_memory_that_was_reserved_is_the_memory_that_a_save_uses(tmp_path):
    model, optimizer = _model(0)
    _train(model, optimizer, 2)
    saver = BackgroundSaver()
    saver.reserve(model, optimizer)
    saver._reserving.result()
    reserved = {name: value.data_ptr() for name, value in saver._buffers.items()}
    saver.begin(model, optimizer, tmp_path)
    _wait(saver)
    assert {name: value.data_ptr() for name, value in saver._buffers.items()} == reserved
    other, other_optimizer = _model(1)
    load_train_state(other, other_optimizer, tmp_path)
    _assert_equal(_snapshot(other, other_optimizer), _snapshot(model, optimizer))


def test_a_large_part_is_split_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 100)
    model, optimizer = _model(0)
    _train(model, optimizer, 2)
    save_train_state(model, optimizer, tmp_path)
    assert len(list((tmp_path / "train_state").glob("*.distcp"))) == 5  # of 456 bytes
    other, other_optimizer = _model(1)
    load_train_state(other, other_optimizer, tmp_path)
    _assert_equal(_snapshot(other, other_optimizer), _snapshot(model, optimizer))


def test_a_save_that_fails_in_the_background_says_so_when_asked(tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    saver = BackgroundSaver()
    saver.begin(*_model(0), tmp_path / "file")
    with pytest.raises(StorageError, match=r"rank 0 could not write .*NotADirectoryError"):
        _wait(saver)


def test_the_whole_weights_alone(tmp_path):
    model, optimizer = _model(0)
    save_train_state(model, optimizer, tmp_path)
    weights = load_full_weights(tmp_path)
    assert weights.keys() == NAMES  # a tied parameter once
    _assert_equal(weights, {name: model.state_dict()[name] for name in NAMES})


def test_optimizer_settings_are_part_of_the_state(tmp_path):
    model, optimizer = _model(0)
    optimizer.param_groups[0]["lr"] = 0.5
    save_train_state(model, optimizer, tmp_path)
    other, other_optimizer = _model(1)
    load_train_state(other, other_optimizer, tmp_path)
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_names_are_those_without_wrappers(tmp_path):
    model, optimizer = _model(0)
    save_train_state(torch.compile(model), optimizer, tmp_path)
    assert load_full_weights(tmp_path).keys() == NAMES


def _wider(model: Tiny) -> None:
    model.block = nn.Linear(3, 4)


def _half(model: Tiny) -> None:
    model.to(torch.bfloat16)


def _untied(model: Tiny) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "message"),
    [(_wider, "different: block.bias"), (_half, "bfloat16"), (_untied, "model only: head.weight")],
)
def test_another_model_is_refused_not_cast(tmp_path, change, message):
    model, optimizer = _model(0)
    save_train_state(model, optimizer, tmp_path)
    other = copy.deepcopy(model)
    change(other)
    with pytest.raises(CheckpointError, match=message):
        load_train_state(other, torch.optim.AdamW(other.parameters()), tmp_path)


def test_another_optimizer_and_an_empty_folder_are_refused(tmp_path):
    model, optimizer = _model(0)
    save_train_state(model, optimizer, tmp_path)
    with pytest.raises(CheckpointError, match="optimizer groups"):
        load_train_state(model, torch.optim.AdamW([model.norm]), tmp_path)
    with pytest.raises(CheckpointError, match="no train state"):
        load_train_state(model, optimizer, tmp_path / "nowhere")


def _rank(rank: int, world: int, folder: Path) -> None:
    for steps, bf16 in ELASTIC:
        model, optimizer = _model(1, shard=True, bf16=bf16)
        _train(model, optimizer, 2)
        load_train_state(model, optimizer, folder / f"by-one-{steps}-{bf16}")
        _assert_equal(_snapshot(model, optimizer), torch.load(folder / f"by-one-{steps}-{bf16}.pt"))
        _train(model, optimizer, 2 if steps else 0)
        save_train_state(model, optimizer, folder / f"by-two-{steps}-{bf16}")
        expected = _snapshot(model, optimizer)
        if rank == 0:
            torch.save(expected, folder / f"by-two-{steps}-{bf16}.pt")
        held = Held()
        held.saver.begin(model, optimizer, folder / f"behind-{steps}-{bf16}")
        _train(model, optimizer, 2)  # with collectives of its own while the other thread has some
        held.let_go.set()
        _train(model, optimizer, 2)
        held.finish()
        load_train_state(model, optimizer, folder / f"behind-{steps}-{bf16}")
        _assert_equal(_snapshot(model, optimizer), expected)
    if rank == 1:
        optimizer.state.pop(model.norm)
    with pytest.raises(CheckpointError, match="rank 1 has other optimizer states"):
        save_train_state(model, optimizer, folder / "uneven")


def test_written_by_one_read_by_two_and_the_reverse(tmp_path):
    for steps, bf16 in ELASTIC:
        model, optimizer = _model(0, bf16=bf16)
        _train(model, optimizer, steps)
        save_train_state(model, optimizer, tmp_path / f"by-one-{steps}-{bf16}")
        torch.save(_snapshot(model, optimizer), tmp_path / f"by-one-{steps}-{bf16}.pt")
    on_ranks(2, _rank, tmp_path)
    for steps, bf16 in ELASTIC:
        model, optimizer = _model(2, bf16=bf16)
        load_train_state(model, optimizer, tmp_path / f"by-two-{steps}-{bf16}")
        expected = torch.load(tmp_path / f"by-two-{steps}-{bf16}.pt")
        _assert_equal(_snapshot(model, optimizer), expected)
        weights = load_full_weights(tmp_path / f"by-two-{steps}-{bf16}")
        _assert_equal(weights, {name: expected[name] for name in NAMES})


def test_pages_are_unlocked_before_they_are_unmapped() -> None:
    class Runtime:
        locked: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            assert ctypes.string_at(address + self.locked.pop(address) - 1, 1) == b"\1"  # still mapped
            return 0

    runtime = Runtime()
    memory = page_locked(torch.empty(1 << 20, 2, dtype=torch.uint8), runtime)
    part = memory.fill_(1)[1:]
    del memory
    assert len(runtime.locked) == 1
    del part
    assert not runtime.locked
