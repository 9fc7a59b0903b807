"""Model FLOPs, by hand."""

from dataclasses import replace

import pytest

from rlcore.flops import NOTHING, GroupSize, ModelShape, TowerShape, Work, pass_work, peak_flops, utilisation

TEXT = ModelShape(parameters=1000, head_parameters=500, layers=2, width=8, weights_train=True, tower=None)
TOWER = TowerShape(
    parameters=100,
    merger_parameters=40,
    merged=4,
    patch_size=14,
    width=4,
    full_layers=1,
    window_layers=2,
    window=8,
    trains=True,
)


def test_a_group_of_two_by_hand():
    """Prompt 4, completions 2 and 6, 7 of these 8 tokens trained: 12 tokens computed where 16 lie in the sequences."""
    pairs = 4 * 4 / 2 + 2 * (4 + 1) + 6 * (4 + 3)  # 8 + 10 + 42
    forward = 2 * 1000 * 12 + 2 * 500 * 7 + 4 * 2 * 8 * pairs
    assert pass_work(TEXT, [GroupSize(4, (2, 6), 7)], []) == Work(forward, 2 * forward, 12, 4, 4)


def test_pairs_of_one_group_are_those_of_its_sequences_less_the_prompts_that_are_not_computed_again():
    alone = [pass_work(TEXT, [GroupSize(4, (length,), length)], []) for length in (2, 6)]
    together = pass_work(TEXT, [GroupSize(4, (2, 6), 8)], [])
    prompt = pass_work(TEXT, [GroupSize(4, (), 0)], [])
    assert sum(w.forward_flops for w in alone) - together.forward_flops == prompt.forward_flops


def test_a_window_by_hand():
    """A window of 3 in one of two layers. Prompt 4: 1/2 + 3/2 + 5/2 + 5/2 pairs. Completion 2: twice 5/2."""
    shape = replace(TEXT, windows=(3,))
    pairs = (4 * 4 / 2 + 2 * (4 + 1)) + (7 + 5)
    forward = 2 * 1000 * 6 + 2 * 500 * 2 + 4 * 8 * pairs
    assert pass_work(shape, [GroupSize(4, (2,), 2)], []).forward_flops == forward
    assert pass_work(replace(TEXT, windows=(6,)), [GroupSize(4, (2,), 2)], []) == pass_work(
        TEXT, [GroupSize(4, (2,), 2)], []
    )


def test_states_by_hand():
    """One of two layers has states of 24 elements. A token reads them twice and writes them once, two FLOPs each."""
    shape = replace(TEXT, recurrent_layers=1, state_elements=24)
    pairs = 4 * 4 / 2 + 2 * (4 + 1)
    forward = 2 * 1000 * 6 + 2 * 500 * 2 + 4 * 8 * pairs + 6 * 24 * 6
    assert pass_work(shape, [GroupSize(4, (2,), 2)], []).forward_flops == forward
    assert shape.attention_weight == 2 * 8 / 1000


def test_the_tower_by_hand():
    """56 x 56 pixels: 16 patches; the full layer sees 16 of them, the two with windows 8."""
    shape = ModelShape(parameters=1000, head_parameters=0, layers=2, width=8, weights_train=True, tower=TOWER)
    with_image, without = (pass_work(shape, [GroupSize(4, (), 0)], images) for images in ([(56, 56)], []))
    assert with_image.forward_flops - without.forward_flops == 2 * 16 * (100 + 10) + 4 * 4 * 16 * (16 + 2 * 8)


def test_what_does_not_train_has_no_weight_gradients():
    frozen = ModelShape(parameters=1000, head_parameters=0, layers=2, width=8, weights_train=False, tower=None)
    work = pass_work(frozen, [GroupSize(4, (2,), 2)], [])
    assert work.backward_flops == work.forward_flops


def test_a_tower_that_does_not_train_is_not_counted():
    tower = replace(TOWER, trains=False)
    shape = ModelShape(parameters=1000, head_parameters=0, layers=2, width=8, weights_train=True, tower=tower)
    with_image, without = (pass_work(shape, [GroupSize(4, (), 0)], images) for images in ([(56, 56)], []))
    assert with_image == without


def test_attention_weight_is_the_cost_of_a_pair_in_tokens():
    assert TEXT.attention_weight == 4 * 2 * 8 / (2 * 1000)


def test_utilisation_by_hand_and_by_the_devices_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert utilisation(989e12, 2.0, 1, "NVIDIA H200") == 0.5
    assert utilisation(989e12, 2.0, 2, "NVIDIA H200") == pytest.approx(0.25)
    assert utilisation(1.0, 1.0, 1, "cpu") is None


def test_work_adds_up_from_nothing():
    first, second = Work(1.0, 2.0, 3, 4, 5), Work(10.0, 20.0, 30, 40, 50)
    assert NOTHING + first == first
    assert first + second == Work(11.0, 22.0, 33, 44, 55)
