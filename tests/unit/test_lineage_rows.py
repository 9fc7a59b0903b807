"""The rows of a step are looked for in the data that has them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.errors import RegistryError
from infra.settings import Settings
from rlcore.artifacts import DatasetRef
from rlcore.data.table import PreparedRow, write_rows
from rlcore.errors import StorageError
from rlcore.segment.batch_log import write_trained
from rlcore.types import ImageRef, Problem
from tasks import lineage as lineage_module
from tasks.cli import app
from tasks.experiments import load_experiment
from tasks.lineage import Lineage, Origin, TrainedRow, trained_rows
from tasks.run import Run


def dataset(folder: Path, *names: str) -> DatasetRef:
    folder.mkdir()
    rows = [
        PreparedRow(
            Problem(name, f"<image>{name}?", (ImageRef(name * 64, 28, 28),), "1", "files", {}), 10 + place, 5, 1
        )
        for place, name in enumerate(names)
    ]
    write_rows(folder, rows)
    return DatasetRef(
        path=str(folder), digest=folder.name, source="files", num_problems=len(names), num_rejected=0,
        num_images=len(names), max_prompt_tokens=5,
    )  # fmt: skip


def lineage(*datasets: DatasetRef) -> Lineage:
    origins = tuple(Origin.model_construct(train=item) for item in datasets)
    return Lineage.model_construct(run_id="run", origins=origins)


def test_each_step_leads_to_its_rows_and_pictures_whichever_data_they_are_of(tmp_path: Path) -> None:
    experiment = load_experiment("grpo-geo3k-tiny", ["training.problems_per_batch=2"])
    run = Run(run_id="run", run_dir=tmp_path / "run", experiment=experiment)
    write_trained(run.run_dir, 1, ["b", "a"])
    write_trained(run.run_dir, 2, ["c", "a"])
    write_trained(run.run_dir, 3, ["x", "a"])
    first, other = dataset(tmp_path / "first", "a", "b"), dataset(tmp_path / "other", "a", "c")
    found = trained_rows(lineage(first, other), run, 1)
    assert [(row.problem_id, row.row) for row in found] == [("b", 11), ("a", 10)]
    assert found[0].images == (str(tmp_path / "first" / "images" / f"{'b' * 64}.png"),)
    assert [row.row for row in trained_rows(lineage(first, other), run, 2)] == [11, 10]
    with pytest.raises(StorageError, match=r"has the problems \['x', 'a'\]"):
        trained_rows(lineage(first, other), run, 3)


def test_a_command_prints_the_rows_of_a_step_below_the_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(run_id="run", run_dir=tmp_path, experiment=load_experiment("grpo-geo3k-tiny"))
    row = TrainedRow(
        problem_id="p1", source="files", row=3, question="2+2?", answer="4", images=("/a.png", "/b.png"),
        image_sha256=("a", "b"),
    )  # fmt: skip
    found = SimpleNamespace(rows=lambda: [("model", "toy version 1")], run_dir="/gone")
    monkeypatch.setattr(lineage_module, "find_lineage", lambda *_: (found, run))
    monkeypatch.setattr(lineage_module, "trained_rows", lambda *words: [row] if words == (found, run, 2) else [])
    app(["lineage", "toy", "--step", "2"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == [
        "model  toy version 1", "p1     row 3 of files: '2+2?' -> '4'", "       /a.png", "       /b.png",
    ]  # fmt: skip
    monkeypatch.setattr(lineage_module, "find_lineage", lambda *_: (found, None))
    with pytest.raises(SystemExit, match=r"^StorageError: the run's folder /gone is not on this machine, and only it"):
        app(["lineage", "toy", "--step", "2"], standalone_mode=False)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({"rlflow.run_id": "r"}, r"was registered before lineages existed\. Run \.venv/bin/rlflow merge r\.$"),
        ({}, "rlflow did not register it"),
    ],
)
def test_a_model_without_a_lineage_says_what_to_do(
    tags: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = SimpleNamespace(name="toy", version="1", mlflow_run_id="m", tags=tags)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(lineage_module, "find_model", lambda uri, words: version)
    monkeypatch.setattr(lineage_module, "read_text", lambda *words: asked.append(words))
    with pytest.raises(RegistryError, match=said):
        lineage_module.find_lineage("toy", Settings())
    assert [words[1:] for words in asked] == [("m", "lineage/toy-1.json")]
