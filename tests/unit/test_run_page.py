"""The page of a run and what a notebook shows of its rollouts, cell by cell."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from rlcore.artifacts import CheckpointRef, DatasetRef, DuplicatesRef, EvalReport, ModelRef
from rlcore.data.contamination import Duplicate
from rlcore.errors import ConfigError
from rlcore.evaluation.report import PartAccuracy
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest
from tasks.experiments import load_experiment
from tasks.lineage import Lineage, SegmentLine
from tasks.report.contamination import Contamination, ShownPair, ShownProblem
from tasks.report.cost import RunCost
from tasks.report.page import Page, data_uri, draw_curves, read_samples, summarize
from tasks.report.rollouts import as_html, read_groups, sampled_steps
from tasks.run import Run

DATASET = DatasetRef(
    path="/data/train", digest="d" * 20, source="files", num_problems=7, num_rejected=2, num_images=3,
    max_prompt_tokens=9,
)  # fmt: skip
MODEL = ModelRef(
    path="/models/m", digest="m" * 20, source="tiny", num_parameters=1, registered_name="toy", registered_version="3"
)
CHECKPOINT = CheckpointRef(
    path="/run/checkpoints/step-000020", step=20, policy_version=20, manifest_sha256="c" * 20, run_id="r", segment=1
)
COST = RunCost(
    devices=2, gpu_seconds={"update": 30.0, "generate": 90.0}, redone_gpu_seconds=60.0, evaluation_gpu_seconds=180.0,
    generated_tokens=12345.0, trained_tokens=6789.0, in_step_share=0.875, update_utilisation=0.25,
    step_utilisation=0.125,
)  # fmt: skip


def evaluated(step: int, accuracy: float, reward: float) -> EvalReport:
    return EvalReport(
        policy="p", step=step, dataset_digest="d", num_problems=50, samples_per_problem=4, accuracy=accuracy,
        accuracy_low=accuracy - 0.0625, accuracy_high=accuracy + 0.125, reward=reward, reward_low=reward - 0.03125,
        reward_high=reward + 0.25, truncated=step / 100, ungraded=0, table="t", seconds=1.0,
    )  # fmt: skip


BEFORE, AFTER = evaluated(0, 0.25, 0.5), evaluated(20, 0.75, 0.625)


def lineage(tmp_path: Path) -> Lineage:
    segment = SegmentLine(
        segment=0, first_step=0, last_step=10, checkpoint="/run/checkpoints/step-000010", manifest_sha256="a",
        on_disk=False, retries=(),
    )  # fmt: skip
    last = segment.model_copy(
        update={"segment": 1, "first_step": 10, "last_step": 20, "checkpoint": CHECKPOINT.path, "on_disk": True}
    )
    return Lineage(
        model=MODEL, run_id="r", run_dir=str(tmp_path), mlflow_run_id="mlflow-1", checkpoint=CHECKPOINT,
        checkpoint_code_digest="code", checkpoint_versions={"torch": "2", "ray": "3"}, segments=(segment, last),
        drivers=(), origins=(), changes=('{"a|b"}',), experiment={}, experiment_digest="experiment",
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Five kept steps of one problem with a picture and one without."""
    pictures = tmp_path / "train" / "images"
    pictures.mkdir(parents=True)
    (pictures / "pic.png").write_bytes(b"a picture")
    run = Run(run_id="the-run", run_dir=tmp_path / "run", experiment=load_experiment("grpo-geo3k-tiny"))
    (run.run_dir / "samples").mkdir(parents=True)
    (run.run_dir / "spec.json").write_text(json.dumps({"dataset": {"path": str(tmp_path / "train")}}))
    for step in (10, 2, 4, 6, 8):
        rows = [
            {
                "problem_id": name, "question": f"<b>{name}?", "answer": "<i>4", "images": ["pic"] * (name == "p1"),
                "completion": f"<u>{name} {j} of {step}", "reward": j / 2, "parts": {"right": j / 2, "<form>": 1.0},
                "graded": j > 0, "tokens": 10 + j, "finish_reason": "stop",
            }
            for name in ("p1", "p2")
            for j in range(3)
        ]  # fmt: skip
        (run.run_dir / "samples" / f"step-{step:06d}.json").write_text(json.dumps(rows))
    return run


def test_kept_steps_are_in_order_and_their_groups_whole(run: Run, tmp_path: Path) -> None:
    assert sampled_steps(run) == [2, 4, 6, 8, 10]
    first, second = read_groups(run, 4)
    one = first.completions[0]
    assert (one.step, one.problem_id, one.question, one.answer) == (4, "p1", "<b>p1?", "<i>4")
    assert (first.pictures, second.pictures) == ((tmp_path / "train" / "images" / "pic.png",), ())
    assert [item.completion for item in first.completions] == [f"<u>p1 {j} of 4" for j in range(3)]
    assert [item.completion for item in second.completions] == [f"<u>p2 {j} of 4" for j in range(3)]
    assert [(item.reward, item.graded, item.tokens) for item in first.completions] == [
        (0.0, False, 10), (0.5, True, 11), (1.0, True, 12),
    ]  # fmt: skip
    assert first.completions[1].parts == {"right": 0.5, "<form>": 1.0}
    assert first.completions[1].finish_reason == "stop"
    with pytest.raises(ConfigError, match=r"^run the-run saved no completions of step 5\. .*: 2, 4, 6, 8, 10\.$"):
        read_groups(run, 5)
    empty = run.model_copy(update={"run_dir": tmp_path / "empty"})
    with pytest.raises(ConfigError, match=r"Steps that have some: none\.$"):
        read_groups(empty, 5)


def test_a_group_as_html_has_the_best_completion_first_and_escapes_all_texts(run: Run) -> None:
    page = as_html(read_groups(run, 4)[0])
    assert [float(reward) for reward in re.findall(r"'><b>(\d\.\d\d)</b>", page)] == [1.0, 0.5, 0.0]
    assert re.findall(r"background:(#\w+)'><b>", page) == ["#eaf6ef", "#fff", "#fff"]
    assert re.findall(r"<small>(.*?)</small>", page) == [
        "right 1, &lt;form&gt; 1; 12 tokens, stop",
        "right 0.5, &lt;form&gt; 1; 11 tokens, stop",
        "right 0, &lt;form&gt; 1, not graded; 10 tokens, stop",
    ]
    assert f"src='data:image/png;base64,{base64.b64encode(b'a picture').decode()}'" in page
    assert "<b>step 4</b>, p1</p>" in page
    assert "answer: <b>&lt;i&gt;4</b>" in page
    assert "&lt;b&gt;p1?</pre>" in page
    assert page.count("&lt;u&gt;p1") == 3
    assert "<img" not in as_html(read_groups(run, 4)[1])


def test_samples_for_the_page_are_spread_over_the_run(run: Run) -> None:
    samples = read_samples(run)
    assert [item.step for item in samples] == [2, 2, 2, 4, 4, 4, 8, 8, 8, 10, 10, 10]
    assert [item.completion for item in samples[:3]] == ["<u>p1 0 of 2", "<u>p1 1 of 2", "<u>p1 2 of 2"]
    sample = samples[1]
    assert (sample.question, sample.answer, sample.images, sample.reward) == ("<b>p1?", "<i>4", ("pic",), 0.5)
    assert sample.finish_reason == "stop"
    (run.run_dir / "samples" / "step-000006.json").unlink()
    assert [item.step for item in read_samples(run)] == [2] * 3 + [4] * 3 + [8] * 3 + [10] * 3


def test_the_first_and_the_last_tenth_of_the_rewards() -> None:
    records = [StepRecord(step, step, {"reward/mean": float(step)}) for step in range(1, 21)]
    records.insert(5, StepRecord(5, 5, {"loss/total": 1.0}))  # the second update of a batch has no reward
    manifest = SegmentManifest.model_construct(last_step=20, checkpoint=CHECKPOINT)
    summary = summarize(records, BEFORE, AFTER, [manifest, manifest], MODEL, CHECKPOINT, 12.34, "mlflow-1")
    assert summary.model_dump() == {
        "accuracy_before": 0.25, "accuracy_after": 0.75, "reward_first": 1.5, "reward_last": 19.5, "steps": 20,
        "segments": 2, "wall_seconds": 12.3, "mlflow_run_id": "mlflow-1", "checkpoint": CHECKPOINT.path,
        "merged_model": "/models/m",
    }  # fmt: skip
    few = summarize(records[:3], BEFORE, AFTER, [manifest], MODEL, CHECKPOINT, 1, "mlflow-1")
    assert (few.reward_first, few.reward_last) == (1.0, 3.0)


def test_both_pages_say_the_same_numbers(run: Run, tmp_path: Path) -> None:
    manifest = SegmentManifest.model_construct(last_step=20, checkpoint=CHECKPOINT)
    records = [StepRecord(step, step, {"reward/mean": step / 8}) for step in range(1, 3)]
    summary = summarize(records, BEFORE, AFTER, [manifest], MODEL, CHECKPOINT, 61.7, "mlflow-1")
    results = [
        ("accuracy, held out [95 %]", "0.250 [0.188, 0.375]", "0.750 [0.688, 0.875]"),
        ("reward, held out [95 %]", "0.500 [0.469, 0.750]", "0.625 [0.594, 0.875]"),
        ("cut at the length limit", "0.000", "0.200"),
        ("problems x samples", "50 x 4", "50 x 4"),
    ]
    cost = [
        ("GPU-hours", "0.100 on 2 device(s)"),  # 30 + 90 + 60 + 180 = 360 s
        ("GPU-seconds, generate", "90.0 (75 %)"),
        ("GPU-seconds, update", "30.0 (25 %)"),
        ("GPU-seconds, done again", "60.0"),
        ("GPU-seconds, evaluation", "180.0"),
        ("tokens generated, trained on", "12,345, 6,789"),
        ("time within steps", "88 % from the first step to the last"),
        ("model FLOPs utilisation", "25.0 % in updates, 12.5 % over whole steps"),
    ]
    origin = [
        ("model", f"toy version 3, /models/m ({'m' * 16})"),
        ("run", f"r, {tmp_path}; MLflow run mlflow-1"),
        ("checkpoint", f"step 20, /run/checkpoints/step-000020 (manifest {'c' * 16})"),
        ("segment 0", "steps 1 to 10, /run/checkpoints/step-000010, removed"),
        ("segment 1", "steps 11 to 20, /run/checkpoints/step-000020"),
        ("starts", "0: "),
        ("trained with", "rlcore code; ray 3, torch 2"),
        ("config", f"digest experiment, {tmp_path}/experiment.json"),
    ]
    shown = Page(run, summary, BEFORE, AFTER, MODEL, DATASET, read_samples(run)[:2], COST, lineage(tmp_path))
    text = shown.markdown()
    for row in [*results, *cost, *origin]:
        assert f"| {' | '.join(row)} |\n" in text
    assert '| changed during the run | {"a\\|b"} |\n' in text
    assert text.startswith("# the-run\n\n| | before | after |\n| --- | --- | --- |\n| accuracy")
    assert "Training reward 0.125 -> 0.250 in 20 steps, 1 segments, 62 s." in text
    assert "- model: `/models/m` (registered: toy version 3)\n" in text
    assert f"- checkpoint: `{CHECKPOINT.path}`\n- MLflow run: `mlflow-1`\n" in text
    assert f"`{run.run_dir}/report/report.html`" in text
    assert "| 2 | &#60;b&#62;p1? | &#60;i&#62;4 | &#60;u&#62;p1 1 of 2 | 0.50 |\n" in text

    (tmp_path / "curves.png").write_bytes(b"curves")
    page = shown.html(tmp_path / "curves.png")
    for row in results:
        assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in page
    facts = [
        ("run", "the-run"), ("steps, segments", "20, 1"), ("training reward, first and last tenth", "0.125, 0.250"),
        ("wall time", "62 s"), ("model", "/models/m (toy version 3)"), ("checkpoint", CHECKPOINT.path),
        ("MLflow run", "mlflow-1"), ("validation data", f"files ({'d' * 20})"),
    ]  # fmt: skip
    for name, value in [*facts, *cost, *origin]:
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in page
    picture = base64.b64encode(b"a picture").decode()
    assert (
        f"<tr><td>2</td><td><img alt='' src='data:image/png;base64,{picture}'></td><td>&lt;b&gt;p1?</td>"
        "<td>&lt;i&gt;4</td><td>&lt;u&gt;p1 1 of 2</td><td>0.50</td></tr>" in page
    )
    assert f"src='{data_uri(tmp_path / 'curves.png')}'" in page
    assert "&#34;name&#34;: &#34;grpo-geo3k-tiny&#34;" in page


def shared(tmp_path: Path, near: int, *, exact_only: bool = False) -> Contamination:
    """Of 50 problems ``near`` are near to one of training."""
    for name in ("validation", "training"):
        (tmp_path / f"{name}.png").write_bytes(name.encode())
    sides = [
        ShownProblem(f"{name}/0", f"<b>{name}?", "<i>7", (tmp_path / f"{name}.png",))
        for name in ("validation", "training")
    ]
    found = DuplicatesRef(
        path="/made/duplicates.jsonl", digest="a" * 20, train_digest="t", evaluation_digest="v", problems=50, exact=0,
        near=near, same_images=0, exact_only=exact_only,
    )  # fmt: skip
    pairs = [ShownPair(Duplicate("validation/0", "training/0", "near", 0.875, 30), *sides)] * bool(near)
    return Contamination(found, PartAccuracy(46, 0.2, 0.1, 0.3), None, pairs)


def test_duplicates_are_shown_side_by_side_and_the_clean_accuracy_beside_the_whole(run: Run, tmp_path: Path) -> None:
    manifest = SegmentManifest.model_construct(last_step=20, checkpoint=CHECKPOINT)
    summary = summarize([StepRecord(1, 1, {"reward/mean": 1.0})], BEFORE, AFTER, [manifest], MODEL, CHECKPOINT, 1, "m")
    (tmp_path / "curves.png").write_bytes(b"curves")
    shown = Page(
        run, summary, BEFORE, AFTER, MODEL, DATASET, [], COST, lineage(tmp_path), contamination=shared(tmp_path, 4)
    )
    page, text = shown.html(tmp_path / "curves.png"), shown.markdown()
    row = ("accuracy, clean part [95 %]", "0.200 [0.100, 0.300] on 46", "no clean problem")
    assert f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" in page
    assert f"| {' | '.join(row)} |\n" in text
    for name in ("validation", "training"):
        uri = f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}"
        assert (
            f"<td><small>{name}/0</small><br><img alt='' src='{uri}'>"
            f"<p>&lt;b&gt;{name}?</p>answer: &lt;i&gt;7</td>" in page
        )
    likeness = "near: similarity of texts 0.88, pictures differ in 30 of 256 bits"
    assert f"<td>{likeness}</td></tr>" in page
    assert f"| {likeness} | &#60;b&#62;validation? | &#60;b&#62;training? |\n" in text
    for name, number in (("near: similar text, similar pictures", 4), ("clean", 46)):
        assert f"<tr><td>{name}</td><td>{number} of 50</td></tr>" in page
        assert f"| {name} | {number} of 50 |\n" in text


def test_a_run_without_duplicates_has_one_line_about_them(run: Run, tmp_path: Path) -> None:
    manifest = SegmentManifest.model_construct(last_step=20, checkpoint=CHECKPOINT)
    summary = summarize([StepRecord(1, 1, {"reward/mean": 1.0})], BEFORE, AFTER, [manifest], MODEL, CHECKPOINT, 1, "m")
    (tmp_path / "curves.png").write_bytes(b"curves")
    none = shared(tmp_path, 0, exact_only=True)
    shown = Page(run, summary, BEFORE, AFTER, MODEL, DATASET, [], COST, lineage(tmp_path), contamination=none)
    page = shown.html(tmp_path / "curves.png")
    line = "<tr><td>validation problems that training has too</td><td>0 of 50 problems: exact 0</td></tr>"
    assert line in page
    assert "clean" not in page
    assert "Duplicates in training" not in page
    assert "Duplicates in training" not in shown.markdown()


def test_a_long_text_is_cut_on_both_pages(run: Run, tmp_path: Path) -> None:
    path = run.run_dir / "samples" / "step-000002.json"
    rows = json.loads(path.read_text())
    rows[0]["completion"], rows[1]["completion"] = "a" * 600, "b" * 601
    path.write_text(json.dumps(rows))
    manifest = SegmentManifest.model_construct(last_step=20, checkpoint=CHECKPOINT)
    summary = summarize([StepRecord(1, 1, {"reward/mean": 1.0})], BEFORE, AFTER, [manifest], MODEL, CHECKPOINT, 1, "m")
    (tmp_path / "curves.png").write_bytes(b"curves")
    shown = Page(run, summary, BEFORE, AFTER, MODEL, DATASET, read_samples(run)[:2], COST, lineage(tmp_path))
    text = shown.markdown()
    assert f"| {'a' * 600} |" in text
    assert f"| {'b' * 600}... |" in text
    page = shown.html(tmp_path / "curves.png")
    assert f"<td>{'a' * 600}</td>" in page
    assert f"<td>{'b' * 600}</td>" in page


def test_curves_show_the_journal_the_evaluations_and_the_seconds_of_each_phase() -> None:
    records = [
        StepRecord(1, 1, {"reward/mean": 0.25, "loss/kl_ref": 0.5}),
        StepRecord(2, 2, {"reward/mean": 0.5, "time/step": 9.0, "time/update": 4.0, "time/generate": 3.0}),
        StepRecord(3, 3, {"reward/mean": 0.75, "time/step": 9.0, "time/update": 5.0, "time/generate_beside": 2.0}),
    ]
    middle = AFTER.model_copy(update={"step": 10, "accuracy": 0.5, "accuracy_low": 0.375, "accuracy_high": 0.625})
    axes = draw_curves(records, [BEFORE, middle, AFTER]).axes
    lines = {line.get_label(): line.get_xydata().tolist() for axis in axes for line in axis.lines}
    assert lines["reward/mean"] == [[1, 0.25], [2, 0.5], [3, 0.75]]
    assert lines["loss/kl_ref"] == [[1, 0.5]]
    assert "loss/kl_old" not in lines
    reward, accuracy = axes[0].containers[0], axes[1].containers[0]
    assert reward.lines[0].get_xydata().tolist() == [[0, 0.5], [10, 0.625], [20, 0.625]]
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 0.25], [10, 0.5], [20, 0.75]]
    bars = [segment.tolist() for segment in accuracy.lines[2][0].get_segments()]
    assert bars == [[[0, 0.1875], [0, 0.375]], [[10, 0.375], [10, 0.625]], [[20, 0.6875], [20, 0.875]]]
    assert reward.get_label() == "held out (95 %)"
    phases = axes[8]
    assert [area.get_label() for area in phases.collections] == ["generate", "update"]
    tops = [{tuple(corner) for corner in area.get_paths()[0].vertices.tolist()} for area in phases.collections]
    assert {(2, 3), (3, 0)} <= tops[0]
    assert {(2, 7), (3, 5)} <= tops[1]
    assert [axis.get_title() for axis in axes][:2] == ["reward", "accuracy"]
    assert phases.get_title() == "seconds per phase"
    assert [axis.get_legend() is not None for axis in axes] == [True, True, True] + [False] * 5 + [True]
