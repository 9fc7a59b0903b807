"""Preparing a dataset: usable rows, rejects and their reasons, the report, and the cache key."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlcore.artifacts import DatasetRef
from rlcore.config import DataConfig, ModelConfig, build_experiment
from rlcore.data.prepare.folder import dataset_key, load_report
from rlcore.data.probe import probe_samples
from rlcore.data.processor import load_processor
from rlcore.data.rejects import read_rejects
from rlcore.data.table import load_problems, load_rows, write_rows
from rlcore.distributed.worker import WorkerSpec
from rlcore.distributed.worker import _prompts as worker_prompts
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.files import building
from rlcore.jobs.prepare import prepare
from rlcore.specs import PrepareSpec
from rlcore.types import ImageRef, Message, Problem


def png(width: int = 60, height: int = 60, color: str = "white") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, format="PNG")
    return file.getvalue()


def row(problem: object = "<image>Find x.", answer: object = "1", images: object = None, **extra: object) -> dict:
    return {"problem": problem, "answer": answer, "images": [png()] if images is None else images, **extra}


def write(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def spec_for(path: Path, **data: object) -> PrepareSpec:
    return PrepareSpec(
        result=path.parent / "result.json",
        source=str(path),
        source_path=path,
        split="train",
        data=DataConfig(**data),
        model=ModelConfig(),
        datasets_dir=path.parent / "datasets",
    )


def prepared(tmp_path: Path, rows: list[dict], **data: object) -> DatasetRef:
    return prepare(spec_for(write(tmp_path / "rows.parquet", rows), **data))


def rejected_detail(tmp_path: Path, images: object, reason: str) -> str:
    """What is said of the second row; the first one is good."""
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True, exist_ok=True)
    rows = [row("1+1?", images=[]), row(images=images)]
    (source / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ref = prepare(spec_for(source))
    (reject,) = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert reject.reason == reason
    return reject.detail


def test_images_may_lie_anywhere_below_the_source(tmp_path):
    source = tmp_path / "source"
    for folder in ("data", "images"):
        (source / folder).mkdir(parents=True)
    (source / "images" / "a.png").write_bytes(png())
    (source / "images" / "link.png").symlink_to("a.png")
    names = ["../images/a.png", str(source / "images" / "a.png"), "../images/link.png"]
    (source / "data" / "train.jsonl").write_text("\n".join(json.dumps(row(images=[name])) for name in names))
    (tmp_path / "linked").symlink_to(source)
    for root in (source, tmp_path / "linked"):
        assert prepare(spec_for(root)).num_problems == 3


def test_images_of_a_downloaded_snapshot_are_links_to_its_blobs(tmp_path):
    """As the Hugging Face cache lays a repository out."""
    snapshot, blobs = tmp_path / "datasets--a--b" / "snapshots" / "1234", tmp_path / "datasets--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5678").write_bytes(png())
    (snapshot / "a.png").symlink_to("../../blobs/5678")
    (snapshot / "train.jsonl").write_text(json.dumps(row(images=["a.png"])))
    assert prepare(spec_for(snapshot)).num_problems == 1


def test_no_image_outside_the_source_is_read(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link.png").symlink_to(secret)
    (tmp_path / "source" / "folder").symlink_to(tmp_path)
    for name in ("../../secret.png", str(secret), "../link.png", "../folder/secret.png"):
        detail = rejected_detail(tmp_path, [name], "image_outside")
        assert "outside" in detail
        assert str(tmp_path / "source") in detail, "what is allowed"


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
def test_what_is_no_regular_file_is_never_opened(tmp_path, kind):
    odd = tmp_path / "source" / "odd.png"
    odd.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(odd)  # reading it waits for ever
    elif kind == "folder":
        odd.mkdir()
    else:
        os.mknod(odd, 0o600 | stat.S_IFSOCK)
    assert "no regular file" in rejected_detail(tmp_path, ["../odd.png"], "image_missing")


def test_a_device_file_is_not_read(tmp_path):
    assert "outside" in rejected_detail(tmp_path, ["/dev/zero"], "image_outside")


def test_a_file_beyond_any_image_is_not_read(tmp_path):
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "huge.png").open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no space
    assert "1099511627776 bytes" in rejected_detail(tmp_path, ["../huge.png"], "image_too_large")


def test_a_row_becomes_a_problem_and_its_image_is_stored_once(tmp_path):
    picture = png(120, 60)
    rows = [row(images=[picture], id="a", level=2), row("<image>a<image>b", images=[picture, png()], id="b")]
    ref = prepared(tmp_path, rows)
    sha256 = hashlib.sha256(picture).hexdigest()
    first, second = load_problems(Path(ref.path))
    image = ImageRef(sha256, 112, 56)  # 120 / 28 = 4.3, 60 / 28 = 2.1
    assert first == Problem("a", "<image>Find x.", (image,), "1", ref.source, {"level": 2})
    assert second.images[0] == image
    assert (ref.num_problems, ref.num_rejected, ref.num_images) == (2, 0, 2)
    assert (Path(ref.path) / "raw_images" / sha256).read_bytes() == picture
    assert Path(ref.path).name == f"raw-{ref.digest}"


def test_every_reject_has_its_reason(tmp_path):
    rows = [
        row(id="good", videos=[]),
        row("no marker either", images=[png()] * 9, id="too_many_images"),
        row(videos=[[png()] * 8], id="too_many_images-frames"),
        row("<image><video>", id="video_marker_count"),
        row("<video>", images=[], videos=[[]], id="video_format-empty"),
        row("  ", images=[], id="empty_problem"),
        row(answer=" ", id="empty_answer"),
        row(answer=None, id="empty_answer-none"),
        row("<image>a<image>", id="image_marker_count"),
        row("no marker", id="image_marker_count-none"),
        row("<image>a<|im_end|>", id="special_token_in_text"),
        row(images=[b"no image"], id="image_format"),
        row(images=[png()[:20]], id="image_damaged"),
        row(images=[png(6000, 20)], id="image_shape"),
        row("<image>" + "a" * 3000, id="prompt_too_long"),
        row(images=[png(1000, 1000)], id="prompt_too_long-image"),
    ]
    ref = prepared(tmp_path, rows, max_prompt_tokens=1000)
    rejects = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert [reject.problem_id.split("-")[0] for reject in rejects] == [reject.reason for reject in rejects]
    assert [reject.row for reject in rejects] == list(range(1, len(rows)))
    assert (ref.num_problems, ref.num_rejected, ref.num_images) == (1, len(rows) - 1, 1)
    too_long = rejects[-1].detail
    assert "(1296 of images) above 1000" in too_long  # (1000 / 28 = 35.7 -> 36) squared


def test_a_video_is_its_frames_in_the_place_of_its_marker(tmp_path):
    colors = ["red", "green", "blue", "white"]
    still, *film = [png(color=color) for color in colors]
    rows = [
        row("See <video> and <image>.<video>", images=[still], videos=[film[:2], film[2:]], id="a"),
        row("<video>", images=[], videos=["film.mp4"], id="b"),
    ]
    path = tmp_path / "rows.jsonl"
    for index, content in enumerate([still, *film]):
        (tmp_path / f"{index}.png").write_bytes(content)
    rows[0] |= {"images": ["0.png"], "videos": [["1.png", "2.png"], ["3.png"]]}
    path.write_text("\n".join(json.dumps(line) for line in rows))
    ref = prepare(spec_for(path))
    (problem,) = load_problems(Path(ref.path))
    assert problem.question == "See <image><image> and <image>.<image>"
    order = [film[0], film[1], still, film[2]]
    assert [image.sha256 for image in problem.images] == [hashlib.sha256(content).hexdigest() for content in order]
    (reject,) = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert reject.reason == "image_missing"
    assert "film.mp4" in reject.detail


def test_a_file_may_mix_problems_with_and_without_images(tmp_path):
    rows = [row(id="a"), row("1+1?", images=[], id="b"), {**row("2+2?", id="c"), "images": None}]
    ref = prepared(tmp_path, rows)
    assert [len(problem.images) for problem in load_problems(Path(ref.path))] == [1, 0, 0]
    assert ref.num_rejected == 0


def chat(*turns: tuple[str, object]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def test_the_user_s_message_of_a_chat_is_the_problem(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "Find x."}]
    lines = [
        {"prompt": chat(("user", "1+1?")), "reward_model": {"ground_truth": "2"}},
        {"prompt": chat(("system", "Be brief."), ("user", "1+2?")), "reward_model": {"ground_truth": 3}},
        {"prompt": chat(("user", parts)), "reward_model": {"ground_truth": "4"}, "images": ["here.png"]},
        {"prompt": chat(("user", "1?"), ("user", "2?")), "reward_model": {"ground_truth": "4"}},
        {"prompt": chat(("user", "1?"), ("assistant", "2")), "reward_model": {"ground_truth": "4"}},
        {"prompt": chat(("user", "1?"), ("system", "x")), "reward_model": {"ground_truth": "4"}},
        {"prompt": chat(("user", "")), "reward_model": {"ground_truth": "4"}},
        {"prompt": chat(("user", "1+1?")), "reward_model": {"style": "rule"}},
        {"prompt": chat(("user", [{"type": "audio"}])), "reward_model": {"ground_truth": "4"}},
    ]
    (tmp_path / "here.png").write_bytes(png())
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    ref = prepare(spec_for(path, problem_column="prompt", answer_column="reward_model.ground_truth", template="dapo"))
    found = [(problem.question, problem.answer) for problem in load_problems(Path(ref.path))]
    assert found == [("1+1?", "2"), ("1+2?", "3"), ("<image>Find x.", "4")]
    rejects = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert [reject.reason for reject in rejects] == [*["not_text"] * 3, "empty_problem", "empty_answer", "not_text"]
    details = [reject.detail.partition(";")[0].removeprefix("the problem is a ") for reject in rejects[:3]]
    assert details == ["conversation of user, user", "conversation of user, assistant", "conversation of user, system"]


def test_system_message_and_turns_of_an_example_stay_with_the_problem_and_its_images_in_order(tmp_path):
    colors = ["red", "green", "blue"]
    for color in colors:
        (tmp_path / f"{color}.png").write_bytes(png(color=color))
    turns = [("system", "Count."), ("user", [{"type": "image"}, {"type": "text", "text": "How many?"}])]
    turns += [("assistant", "3"), ("user", "<video> And <image>?")]
    line = {"problem": chat(*turns), "answer": "4", "images": ["red.png", "blue.png"], "videos": [["green.png"]]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(line))
    ref = prepare(spec_for(path))
    (problem,) = load_problems(Path(ref.path))
    assert problem.context == (
        Message("system", "Count."),
        Message("user", "<image>How many?"),
        Message("assistant", "3"),
    )
    assert problem.question == "<image> And <image>?"
    expected = [hashlib.sha256(png(color=color)).hexdigest() for color in colors]
    assert [image.sha256 for image in problem.images] == expected
    assert problem.conversation.splitlines()[-1] == "[user] <image> And <image>?"
    (longer,) = load_rows(Path(ref.path))
    (short,) = load_rows(Path(prepare(spec_for(path, system_prompt="Unused: the row has its own.")).path))
    assert longer.prompt_tokens == short.prompt_tokens
    line["problem"][2]["content"] = "spells out <|im_end|>"
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match="special_token"):
        prepare(spec_for(path))


def test_the_system_prompt_counts_towards_the_length(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2"}))
    (plain,), (longer,) = (
        load_rows(Path(prepare(spec_for(path, system_prompt=text)).path)) for text in (None, "Be brief.")
    )
    assert longer.prompt_tokens > plain.prompt_tokens


def test_workers_and_probe_put_the_question_as_preparation_did(tmp_path):
    """Training, evaluation and merge ask through the worker's prompts."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": chat(("user", "1?"), ("assistant", "1"), ("user", "1+1?")), "answer": "2"}))
    model = tmp_path / "model"
    load_processor(ModelConfig()).save_pretrained(model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(f"{template}{{{{ '' if enable_thinking else '<think></think>' }}}}")
    given = {"system_prompt": "Be brief.", "chat_template_arguments": {"enable_thinking": False}, "template": "tiny"}
    spec = spec_for(path, **given).model_copy(update={"model": ModelConfig(path=str(model))})
    folder = Path(prepare(spec).path)
    prompts = worker_prompts(WorkerSpec.alone(model, folder, build_experiment({"name": "x", "data": given}), "cpu"))
    (row,) = load_rows(folder)
    tokens = prompts.tokens(row.problem)
    assert len(tokens) == row.prompt_tokens
    assert prompts.tokenizer.decode(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    (sample,) = probe_samples([row.problem], prompts)
    assert sample.token_ids[: row.prompt_tokens].tolist() == tokens.tolist()


def switched_model(folder: Path) -> Path:
    """A model whose chat template opens a thought, unless ``enable_thinking`` is false."""
    load_processor(ModelConfig()).save_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    ending = "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{{ effort }}"
    (folder / "chat_template.jinja").write_text(template + ending)
    return folder


@pytest.mark.parametrize("form", ["mapping", "text"])
def test_rows_with_their_own_arguments_of_the_chat_template(tmp_path, form):
    """In parquet a mapping has every row's names, with null where the row does not set one."""
    own = [None, {"enable_thinking": False}, {"enable_thinking": True, "effort": "low"}]
    rows = [
        {"problem": "1+1?", "answer": "2", "kwargs": cell if form == "mapping" or cell is None else json.dumps(cell)}
        for cell in own
    ]
    path = write(tmp_path / "rows.parquet", rows)
    model = switched_model(tmp_path / "model")
    given = {"chat_template_arguments_column": "kwargs", "template": "tiny"}
    spec = spec_for(path, **given).model_copy(update={"model": ModelConfig(path=str(model))})
    folder = Path(prepare(spec).path)
    rows = load_rows(folder)
    assert [row.problem.chat_template_arguments for row in rows] == [cell or {} for cell in own]
    assert [row.problem.opens_thought for row in rows] == [None, False, False]  # the last ends with its effort
    assert [row.problem.extra for row in rows] == [{}, {}, {}]
    prompts = worker_prompts(WorkerSpec.alone(model, folder, build_experiment({"name": "x", "data": given}), "cpu"))
    question = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    expected = [f"{question}<think>", f"{question}<think></think>", f"{question}<think>low"]
    assert [prompts.tokenizer.decode(prompts.tokens(row.problem)) for row in rows] == expected
    assert [len(prompts.tokens(row.problem)) for row in rows] == [row.prompt_tokens for row in rows]
    (folder / "problems.parquet").unlink()
    write_rows(folder, rows)
    assert load_rows(folder) == rows


def test_whether_the_row_s_own_prompt_opens_a_thought(tmp_path):
    path = tmp_path / "rows.jsonl"
    own = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    path.write_text("\n".join(json.dumps({"problem": "1?", "answer": "1", "own": cell}) for cell in own))
    model = switched_model(tmp_path / "model")
    spec = spec_for(path, chat_template_arguments_column="own")
    problems = load_problems(Path(prepare(spec.model_copy(update={"model": ModelConfig(path=str(model))})).path))
    assert [problem.opens_thought for problem in problems] == [None, True, False]


@pytest.mark.parametrize(
    ("cell", "detail"),
    [
        ({"thinking": True}, "the model's chat template does not mention thinking"),
        ({"tokenize": True}, "tokenize is set by rlflow"),
        ({"effort": [1]}, "effort is no text, number, true or false"),
        ([1], r"\[1\] is no mapping"),
        ("effort: low", "'effort: low' is not JSON"),
        ("3", "3 is no mapping"),
    ],
)
def test_arguments_that_cannot_be_used_are_set_aside(tmp_path, cell, detail):
    path = tmp_path / "rows.jsonl"
    cells = [{"effort": "low"}, cell]
    path.write_text("\n".join(json.dumps({"problem": "1?", "answer": "1", "own": cell}) for cell in cells))
    model = ModelConfig(path=str(switched_model(tmp_path / "model")))
    spec = spec_for(path, chat_template_arguments_column="own").model_copy(update={"model": model})
    (reject,) = read_rejects(Path(prepare(spec).path) / "rejects.jsonl")
    assert (reject.row, reject.reason) == (1, "chat_template_arguments")
    assert re.match(detail, reject.detail)
    with pytest.raises(DataError, match=r"lacks the column.*'kwargs'.*Set data\.chat_template_arguments_column"):
        prepare(spec_for(path, chat_template_arguments_column="kwargs"))


def test_a_system_message_from_the_row_s_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        {"problem": "<image>Find x.", "answer": "1", "images": ["a.png"], "unit": "cm"},
        {"problem": chat(("system", "Own."), ("user", "1+1?")), "answer": "2", "unit": "m"},
        {"problem": chat(("user", "1?"), ("assistant", "1"), ("user", "1+1?")), "answer": "2", "unit": "km"},
        {"problem": "1+1?", "answer": "2", "unit": ""},
    ]
    (tmp_path / "a.png").write_bytes(png())
    path.write_text("\n".join(map(json.dumps, lines)))
    system = "{% if unit %}Answer in {{ unit }}.{% endif %}"
    spec = spec_for(path, system_prompt="Unused.", template="tiny", layout={"system_prompt": system})
    rows = load_rows(Path(prepare(spec).path))
    assert [[(m.role, m.text) for m in row.problem.context] for row in rows] == [
        [("system", "Answer in cm.")],
        [("system", "Own.")],
        [("system", "Answer in km."), ("user", "1?"), ("assistant", "1")],
        [("system", "")],
    ]
    assert rows[0].problem.question == "<image>Find x."
    # one token per byte, and one for each of <|im_start|>, <|im_end|> and an image's start and end; 60 x 60 pixels are
    # 2 x 2 tokens
    texts = ["system\nAnswer in cm.", "\nuser\n", "Find x.", "\nassistant\n"]
    assert rows[0].prompt_tokens == sum(map(len, texts)) + 3 + 2 + 2 + 4
    with pytest.raises(DataError, match=r"lacks the column.*'measure'.*Set data\.layout\.system_prompt \(measure\)"):
        prepare(spec_for(path, layout={"system_prompt": "{{ measure }}"}))
    with pytest.raises(ConfigError, match=r"data\.layout\.system_prompt '\{\{': .*Fix the Jinja text"):
        prepare(spec_for(path, layout={"system_prompt": "{{"}))


def test_cells_of_other_types_and_missing_files(tmp_path):
    lines = [
        {"problem": "1+1?", "answer": 2},
        {"problem": "1+1?", "answer": 2.5},
        {"problem": "<image>", "answer": "only a picture", "images": "here.png"},
        {"problem": ["not", "text"], "answer": "2"},
        {"problem": "1+1?", "answer": True},
        {"problem": "\ud800", "answer": "2"},
        {"problem": "<image>", "answer": "2", "images": "gone.png"},
    ]
    (tmp_path / "here.png").write_bytes(png())
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    ref = prepare(spec_for(path))
    assert [problem.answer for problem in load_problems(Path(ref.path))] == ["2", "2.5", "only a picture"]
    reasons = [reject.reason for reject in read_rejects(Path(ref.path) / "rejects.jsonl")]
    assert reasons == ["not_text", "not_text", "not_text", "image_missing"]


def test_duplicate_ids_get_a_suffix(tmp_path):
    ref = prepared(tmp_path, [row(id=name) for name in ("a", "a", "a-2", "a", None)])
    assert [problem.problem_id for problem in load_problems(Path(ref.path))] == [
        "a",
        "a-2",
        "a-2-2",
        "a-3",
        "row-4",
    ]


def test_the_report_holds_the_token_budget(tmp_path):
    ref = prepared(tmp_path, [row(), row("Find x.", images=[]), row("", images=[])])
    report = load_report(Path(ref.path))
    text = len("user\nFind x.\n\n") + 1  # a byte a token, and <|im_start|>
    lengths = sorted([report.prompts.max, report.prompts.total - report.prompts.max])
    assert lengths[1] - lengths[0] == 4 + 2  # four image tokens, two around them
    assert lengths[0] > text
    assert report.prompts.image_share == 4 / report.prompts.total
    assert sum(report.prompts.histogram.values()) == report.problems == 2
    assert report.rejected == {"empty_problem": 1}
    assert report.image_sizes == {"56x56": 1}
    assert ref.max_prompt_tokens == report.prompts.max


def test_no_usable_row_names_the_counts_and_the_remedy(tmp_path):
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, [row(picture=png()), row("", images=[])], images_column="image")
    message = str(caught.value)
    assert "none of 2 rows is usable: image_marker_count 1, empty_problem 1" in message
    assert "Columns found: problem, answer, images, picture" in message
    assert "set data.images_column" in message
    assert list((tmp_path / "datasets").iterdir()) == []
    with pytest.raises(DataError, match="prompt_too_long 1.*raise data.max_prompt_tokens"):
        prepared(tmp_path, [row()], max_prompt_tokens=10)


def test_a_finished_dataset_is_returned_and_a_broken_one_refused(tmp_path):
    ref = prepared(tmp_path, [row()])
    stamp = os.stat(ref.path).st_mtime_ns
    assert prepared(tmp_path, [row()]) == ref
    assert os.stat(ref.path).st_mtime_ns == stamp
    next((Path(ref.path) / "raw_images").iterdir()).unlink()
    with pytest.raises(StorageError, match="not complete.*Delete the folder"):
        prepared(tmp_path, [row()])


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    final = tmp_path / "dataset"

    def fail_halfway() -> None:
        with building(final) as aside:
            (aside / "half").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with building(final) as slow:
        (slow / "who").write_text("slow")
        with building(final) as fast:
            (fast / "who").write_text("fast")
    assert (final / "who").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [final]


def test_what_a_killed_run_left_is_removed_after_a_day(tmp_path):
    for name, age in (
        (".dataset.old.tmp", 2 * 24 * 3600),
        (".dataset.new.tmp", 0),
        (".other.old.tmp", 2 * 24 * 3600),
    ):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, (tmp_path / name).stat().st_mtime - age))
    with building(tmp_path / "dataset"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"dataset", ".dataset.new.tmp", ".other.old.tmp"}


def test_the_key_changes_with_content_and_settings_that_matter_and_with_nothing_else(tmp_path):
    path = write(tmp_path / "rows.parquet", [row()])
    key = dataset_key(spec_for(path))
    assert key == dataset_key(spec_for(path).model_copy(update={"result": Path("x"), "datasets_dir": Path("y")}))
    assert key == dataset_key(spec_for(path, shuffle_seed=1))
    changes = [
        {"problem_column": "question"},
        {"template": "r1v"},
        {"min_pixels": 1},
        {"max_pixels": 10**5},
        {"max_prompt_tokens": 9},
        {"max_images": 1},
        {"videos_column": "frames"},
        {"system_prompt": ""},
        {"system_prompt": "Be brief."},
        {"chat_template_arguments": {"enable_thinking": False}},
        {"chat_template_arguments": {"enable_thinking": True}},
        {"chat_template_arguments_column": "kwargs"},
        {"layout": {}},
        {"layout": {"system_prompt": ""}},
        {"layout": {"system_prompt": "Answer in {{ unit }}."}},
    ]
    keys = {dataset_key(spec_for(path, **change)) for change in changes}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    other_model = ModelConfig(path=str(tmp_path / "model"))
    keys.add(dataset_key(spec_for(path).model_copy(update={"model": other_model})))
    (tmp_path / "model" / "tokenizer.json").write_text("{} ")
    keys.add(dataset_key(spec_for(path).model_copy(update={"model": other_model})))
    write(path, [row(), row()])
    keys.add(dataset_key(spec_for(path)))
    assert len(keys | {key}) == 19


def test_the_key_changes_with_an_image_that_the_source_names_by_path(tmp_path):
    path = write(tmp_path / "rows.parquet", [row(images=["a.png"])])
    keys = [dataset_key(spec_for(path))]
    for content in (png(), png(70)):
        (tmp_path / "a.png").write_bytes(content)
        keys.append(dataset_key(spec_for(path)))
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "cells",
    [
        [[{"bytes": png(), "path": "a.png"}]],
        [[{"bytes": png(), "path": "a.png"}], []],
        [[{"bytes": None, "path": "a.png"}]],
        [[{"bytes": png(), "path": "b.png"}], [{"bytes": None, "path": "a.png"}]],
        [["a.png"]],
    ],
)
def test_the_key_does_not_depend_on_the_folder_of_the_source(tmp_path, cells):
    """An image that the table holds counts with the table, also where its path is given."""
    keys = []
    for folder in (tmp_path / "here", tmp_path / "there"):
        folder.mkdir()
        path = write(folder / "rows.parquet", [row(images=cell) for cell in cells])
        (folder / "a.png").write_bytes(png())
        os.utime(folder / "a.png", (1_700_000_000, 1_700_000_000))
        keys.append(dataset_key(spec_for(path).model_copy(update={"source": "s3://lab/data"})))
    assert keys[0] == keys[1]
    (tmp_path / "there" / "a.png").write_bytes(png(70))
    named = any(cell and cell[0] in ("a.png", {"bytes": None, "path": "a.png"}) for cell in cells)
    assert (dataset_key(spec_for(path).model_copy(update={"source": "s3://lab/data"})) != keys[1]) is named


def test_a_key_is_computed_without_torch(tmp_path):
    path = write(tmp_path / "rows.parquet", [row()])
    spec = tmp_path / "spec.json"
    spec.write_text(spec_for(path).model_dump_json())
    code = (
        "import sys; from pathlib import Path; from rlcore.data.prepare.folder import dataset_key;"
        "from rlcore.specs import PrepareSpec;"
        f"print(dataset_key(PrepareSpec.model_validate_json(Path({str(spec)!r}).read_text())));"
        "assert not {'torch', 'transformers', 'datasets', 'vllm', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == dataset_key(spec_for(path))


def test_the_key_of_a_synthetic_source_depends_on_its_settings(tmp_path):
    def key(source: str, **data: object) -> str:
        return dataset_key(
            spec_for(tmp_path / "none", **data).model_copy(update={"source": source, "source_path": None})
        )

    game = {"numbers": [2, 3]}
    assert key("sums@train") == key("sums@train", countdown=game) != key("sums@test")
    assert key("sums@train") != key("sums@train", synthetic_seed=1)
    assert len({key("sums@train"), key("countdown@train"), key("countdown@train", countdown=game)}) == 3


def test_synthetic_problems_need_no_file(tmp_path):
    spec = spec_for(tmp_path / "none", synthetic_problems=12)
    ref = prepare(spec.model_copy(update={"source": "synthetic-geometry@train", "source_path": None}))
    assert (ref.num_problems, ref.num_rejected, ref.num_images) == (12, 0, 12)
