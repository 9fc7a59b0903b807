"""An ablation's table and figures: every cell, and which colour says what."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rlcore.ablation.results import Band, Row
from tasks.ablation.page import (
    csv_table,
    draw_differences,
    draw_learning_curves,
    markdown_table,
    read_table,
    table_rows,
)

BASE = Row(
    point="base",
    label="base | plain",
    status="finished",
    steps=40,
    seeds=3,
    problems=200,
    accuracy=0.5,
    accuracy_low=0.4375,
    accuracy_high=0.5625,
    difference=None,
    difference_low=None,
    difference_high=None,
    p=None,
    p_adjusted=None,
    gpu_hours=1.23456,
)


def compared(label: str, difference: float, low: float, high: float, **changed: object) -> Row:
    numbers = {"difference": difference, "difference_low": low, "difference_high": high, "p": 0.0123456}
    return BASE.model_copy(update={"point": label, "label": label, "p_adjusted": 0.5, **numbers, **changed})


BETTER = compared("better", 0.25, 0.125, 0.375)
WORSE = compared("worse", -0.25, -0.375, -0.125, status="dropped", steps=20)
UNSURE = compared("unsure", 0.0625, -0.125, 0.25)
LOST = BASE.model_copy(
    update={"point": "lost", "label": "lost", "status": "failed", "steps": None, "accuracy": None, "gpu_hours": 0.0}
)


def test_a_row_as_people_read_it() -> None:
    base, better, worse, lost = table_rows([BASE, BETTER, WORSE, LOST])
    assert base == {
        "point": "base | plain",
        "status": "finished",
        "steps": "40",
        "seeds x problems": "3 x 200",
        "accuracy [95 %]": "0.500 [0.438, 0.562]",
        "minus base [95 %]": "-",
        "p": "-",
        "p, adjusted": "-",
        "GPU-hours": "1.23",
    }
    assert better["minus base [95 %]"] == "+0.250 [+0.125, +0.375]"
    assert (better["p"], better["p, adjusted"]) == ("0.0123", "0.5")
    assert worse["minus base [95 %]"] == "-0.250 [-0.375, -0.125]"
    assert (lost["steps"], lost["accuracy [95 %]"], lost["GPU-hours"]) == ("-", "-", "0")


def test_the_table_is_markdown_and_a_label_opens_no_further_cell() -> None:
    head, rule, base, _ = markdown_table([BASE, LOST]).split("\n")
    assert head == (
        "| point | status | steps | seeds x problems | accuracy [95 %] | minus base [95 %] | p | p, adjusted "
        "| GPU-hours |"
    )
    assert rule == "|" + " --- |" * 9
    assert base == "| base \\| plain | finished | 40 | 3 x 200 | 0.500 [0.438, 0.562] | - | - | - | 1.23 |"


def test_the_csv_holds_every_number_in_full_and_is_read_back(tmp_path: Path) -> None:
    rows = [BASE, BETTER, LOST]
    path = tmp_path / "table.csv"
    path.write_text(csv_table(rows), newline="")
    assert read_table(path) == rows
    first, second, _ = csv.DictReader(io.StringIO(csv_table(rows)))
    assert list(first) == list(Row.model_fields)
    assert (first["gpu_hours"], first["difference"], second["p"]) == ("1.23456", "", "0.0123456")


def test_learning_curves_are_the_mean_in_a_band_over_seeds() -> None:
    band = Band(steps=(1, 2, 3), mean=(0.25, 0.5, 0.75), low=(0.0, 0.25, 0.5), high=(0.5, 0.75, 1.0))
    others = [(f"point {i}", band) for i in range(9)]
    figure = draw_learning_curves([("base", band), *others], "reward/mean")
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "reward/mean")
    assert [line.get_label() for line in axis.lines] == ["base", *(f"point {i}" for i in range(9))]
    assert axis.lines[0].get_xydata().tolist() == [[1, 0.25], [2, 0.5], [3, 0.75]]
    corners = {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(1, 0), (2, 0.25), (3, 0.5), (1, 0.5), (2, 0.75), (3, 1)}
    colours = [line.get_color() for line in axis.lines]
    assert len(set(colours)) == 9, "nine colours, then from the start"
    assert colours[9] == colours[0]
    assert [text.get_text() for text in figure.legends[0].texts] == [line.get_label() for line in axis.lines]
    assert draw_learning_curves([], "reward/mean").legends == []


def test_differences_are_plotted_with_intervals_the_first_point_on_top() -> None:
    figure = draw_differences([BASE, BETTER, WORSE, UNSURE, LOST], "base")
    (axis,) = figure.axes
    intervals = [line for line in axis.lines if line.get_marker() == "None"][:3]
    middles = [line for line in axis.lines if line.get_marker() == "s"]
    assert [line.get_xdata().tolist() for line in intervals] == [[-0.125, 0.25], [-0.375, -0.125], [0.125, 0.375]]
    assert [line.get_ydata().tolist() for line in intervals] == [[0, 0], [1, 1], [2, 2]]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in middles] == [
        ([0.0625], [0]), ([-0.25], [1]), ([0.25], [2]),
    ]  # fmt: skip
    grey, orange, green = (line.get_color() for line in middles)
    assert len({grey, orange, green}) == 3
    assert [line.get_color() for line in intervals] == [grey, orange, green]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["unsure", "worse (dropped, step 20)", "better"]
    assert axis.get_yticks().tolist() == [0, 1, 2]
    assert axis.get_ylim() == (-0.6, 2.6)
    assert axis.get_xlabel() == "accuracy minus that of base, 95 %"
    assert any(list(line.get_xdata()) == [0, 0] for line in axis.lines), "where there is no difference"
    touching = draw_differences([compared("a", 0.1, 0.0, 0.2), compared("b", -0.1, -0.2, 0.0)], "base").axes[0]
    assert {line.get_color() for line in touching.lines if line.get_marker() == "s"} == {grey}
    assert figure.get_size_inches()[1] > draw_differences([BETTER], "base").get_size_inches()[1]
