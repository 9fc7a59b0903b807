"""Reading rows: formats, splits, columns, image cells; and the errors of each."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.config import DataConfig, ModelConfig
from rlcore.data.prepare.files import image_files, source_files
from rlcore.data.prepare.sources import SourceRow, open_source, parse_source
from rlcore.errors import DataError
from rlcore.specs import PrepareSpec

ROWS = [
    {"problem": "1+1?", "answer": "2", "id": "a", "level": 3},
    {"problem": "1+2?", "answer": "3", "id": None, "level": float("nan")},
]


def spec_for(source: str, path: Path | None, split: str = "train", **data: object) -> PrepareSpec:
    return PrepareSpec(
        result=Path("unused"),
        source=source,
        source_path=path,
        split=split,
        data=DataConfig(**data),
        model=ModelConfig(),
        datasets_dir=Path("unused"),
    )


def read(path: Path, **data: object) -> list[SourceRow]:
    return list(open_source(spec_for(str(path), path, **data), path).rows)


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    assert read(write(tmp_path / f"rows{suffix}", ROWS)) == [
        SourceRow(0, "a", "1+1?", "2", (), (), {"level": 3}),
        SourceRow(1, None, "1+2?", "3", (), (), {"level": None, "id": None}),  # JSON has no NaN
    ]


def test_a_folder_is_read_in_order_with_one_running_index(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name, [{"problem": name, "answer": "1"}])
    assert [(row.index, row.problem) for row in read(tmp_path)] == [(0, "a.jsonl"), (1, "b.jsonl")]


def test_a_folder_with_splits_never_mixes_them(tmp_path):
    for name in ("data/train-00000.parquet", "data/test-00000.parquet", "data/train-00001.parquet"):
        write(tmp_path / name, ROWS)
    (tmp_path / "dataset_infos.json").write_text("{}")
    names = [file.name for file in source_files(tmp_path, "train")]
    assert names == ["train-00000.parquet", "train-00001.parquet"]
    with pytest.raises(DataError, match="no file of the split 'validation'; found data/test-00000.parquet"):
        source_files(tmp_path, "validation")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("owner/name@test", ("owner/name", "test")),
        ("owner/name", ("owner/name", "train")),
        ("owner/name:subset@test", ("owner/name:subset", "test")),
        ("synthetic-geometry@validation", ("synthetic-geometry", "validation")),
        ("/data/a@b/rows.parquet", ("/data/a@b/rows.parquet", "train")),
    ],
)
def test_the_split_is_what_follows_the_last_at_sign(source, expected):
    assert parse_source(source, "train") == expected


def test_a_missing_column_names_what_was_found_and_what_to_change(tmp_path):
    path = write(tmp_path / "rows.parquet", [{"question": "1+1?", "solution": "2"}])
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "'problem', 'answer'" in message
    assert "Columns found: question, solution" in message
    assert "data.problem_column and data.answer_column" in message
    assert read(path, problem_column="question", answer_column="solution")[0].problem == "1+1?"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, ()),
        ([], ()),
        ([b"x", b"y"], (b"x", b"y")),
        (b"x", (b"x",)),
        ({"bytes": b"x", "path": "ignored.png"}, (b"x",)),
        ([{"bytes": None, "path": "a.png"}], ("a.png",)),
        (["a.png", "sub/b.png"], ("a.png", "sub/b.png")),
        ("a.png", ("a.png",)),
        ([{"bytes": None, "path": None}], (None,)),
        ([""], (None,)),
    ],
)
def test_every_kind_of_image_cell(tmp_path, cell, expected):
    path = write(tmp_path / "rows.parquet", [{"problem": "p", "answer": "a", "images": cell}])
    images = tuple(tmp_path / image if isinstance(image, str) else image for image in expected)
    assert read(path)[0].images == images


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, ()),
        ([], ()),
        ([[b"x", b"y"], [b"z"]], ((b"x", b"y"), (b"z",))),
        ([[{"bytes": b"x", "path": None}, {"bytes": None, "path": "a.png"}]], ((b"x", "a.png"),)),
        ([[]], ((),)),
        (["film.mp4"], ("film.mp4",)),
        ("film.mp4", ("film.mp4",)),
        ([b"x", b"y"], (b"x", b"y")),
        ([{"bytes": None, "path": "film.mp4"}], ("film.mp4",)),
        ([{"bytes": None, "path": None}], (None,)),
    ],
)
def test_every_kind_of_video_cell(tmp_path, cell, expected):
    path = write(tmp_path / "rows.parquet", [{"problem": "p", "answer": "a", "videos": cell}])
    (row,) = read(path)

    def named(item):
        return tuple(map(named, item)) if isinstance(item, tuple) else item.name if isinstance(item, Path) else item

    assert named(row.videos) == expected
    assert row.num_images == sum(len(video) for video in expected if isinstance(video, tuple))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_dotted_name_is_a_path_into_nested_columns(tmp_path, suffix):
    rows = [{"prompt": "p", "reward_model": {"ground_truth": "34", "style": "rule"}, "level": 1}]
    path = write(tmp_path / f"rows{suffix}", rows)
    (row,) = read(path, problem_column="prompt", answer_column="reward_model.ground_truth")
    assert (row.problem, row.answer) == ("p", "34")
    assert row.extra == {"reward_model": {"ground_truth": "34", "style": "rule"}, "level": 1}
    (row,) = read(path, problem_column="prompt", answer_column="reward_model.truth")
    assert row.answer is None
    with pytest.raises(DataError, match=r"lacks the column\(s\) 'rewards.truth'"):
        read(path, problem_column="prompt", answer_column="rewards.truth")


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problem": "p", "a.b": "2", "a": {"b": "3"}}])
    assert read(path, answer_column="a.b")[0].answer == "2"


def test_image_files_lists_only_what_is_outside_the_data_file(tmp_path):
    cells = [["a.png", "b.png"], ["a.png"], None]
    rows = [{"problem": "p", "answer": "a", "images": cell} for cell in cells]
    for name in ("rows.parquet", "rows.jsonl"):
        found = image_files(write(tmp_path / name, rows), "images")
        assert found == [tmp_path / "a.png", tmp_path / "b.png"]
    for name in ("videos.parquet", "videos.jsonl"):
        film = [{"problem": "p", "answer": "a", "videos": [["a.png", "b.png"], ["c.png"]]}]
        assert [path.name for path in image_files(write(tmp_path / name, film), "videos")] == [
            "a.png",
            "b.png",
            "c.png",
        ]
    inside = [{"problem": "p", "answer": "a", "images": [b"x"]}]
    assert image_files(write(tmp_path / "inside.parquet", inside), "images") == []
    assert image_files(write(tmp_path / "text.parquet", ROWS), "images") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"problem": "p", "answer": "a"}\n{"prob', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 holds list, not an object"),
        ("a.jsonl", b'{"problem": "\xff"}', "line 1 is not JSON"),
        ("a.json", b'{"problem": "p"}', "not an array of objects"),
        ("a.json", b"[", "is not JSON"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
        ("a.csv", b"problem,answer", "has the suffix '.csv'"),
    ],
)
def test_a_file_that_does_not_parse_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_a_place_without_data_says_what_is_allowed(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no .parquet, .jsonl, .json file"):
        read(tmp_path)


def test_validation_has_an_eighth_of_the_synthetic_problems(tmp_path):
    spec = spec_for("synthetic-geometry@validation", None, synthetic_problems=20)
    rows = list(open_source(spec, tmp_path).rows)
    assert len(rows) == 2
    assert all(isinstance(row.images[0], bytes) for row in rows)
    with pytest.raises(DataError, match="no split 'tset'"):
        open_source(spec_for("synthetic-geometry@tset", None), tmp_path)


def test_synthetic_sources_have_the_columns_that_their_rewards_need(tmp_path):
    (game, *_) = open_source(spec_for("countdown@test", None, synthetic_problems=16), tmp_path).rows
    assert game.answer == str(game.extra["target"])
    assert 3 <= len(game.extra["nums"]) <= 4
    (total, *_) = open_source(spec_for("sums@train", None, synthetic_problems=16), tmp_path).rows
    assert eval(str(total.problem).removesuffix("=")) == int(str(total.answer))
    assert total.extra == {}


def test_the_datasets_library_gives_images_as_they_are_stored(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    picture = {"bytes": b"not decoded", "path": None}
    features = datasets.Features(
        problem=datasets.Value("string"),
        answer=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )
    rows = [{"problem": "<image>p", "answer": "a", "images": [picture]}]
    (tmp_path / "repo").mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "repo" / "train.parquet")

    source = open_source(spec_for(f"{tmp_path / 'repo'}", None), tmp_path)
    subset = open_source(spec_for(f"{tmp_path / 'repo'}:default@train", None), tmp_path)
    assert subset.num_rows == 1
    assert (source.num_rows, source.columns) == (1, ("problem", "answer", "images"))
    assert next(source.rows).images == (b"not decoded",)
    with pytest.raises(DataError, match="cannot be loaded"):
        open_source(spec_for(f"{tmp_path / 'repo'}", None, split="validation"), tmp_path)
