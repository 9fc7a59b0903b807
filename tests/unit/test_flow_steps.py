"""Steps of a flow that call other steps: what they hand on, and what they make again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.errors import ServerError
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelRef
from rlcore.errors import WorkerLostError
from rlcore.failures import error_of_exit
from tasks import data
from tasks import evaluate as evaluation
from tasks import experiments as benchmarks
from tasks.ablation import steps as ablating
from tasks.ablation import study as ablation
from tasks.ablation.study import Ablation, open_ablation
from tasks.cli import app
from tasks.cli import docs as reference
from tasks.driver import publish as publishing
from tasks.driver.jobs import UNKNOWN_EXIT, describe_exit
from tasks.driver.publish import Publisher, Publishers
from tasks.evaluate import suite_of
from tasks.experiments import load_experiment
from tasks.report import page as reporting
from tasks.report.page import Sample
from tasks.run import Run, open_run
from tasks.store.made import made
from tasks.train import Trainer, last_words

TINY = "grpo-geo3k-tiny"
EXPERIMENT = load_experiment(TINY)
START = ModelRef(path="/start", digest="start", source="tiny", num_parameters=1_500_000)
CHECKPOINT = CheckpointRef(path="/c", step=8, policy_version=8, manifest_sha256="m", run_id="run", segment=2)


class Step:
    """Stands for a task of Prefect's."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.results.pop(0)


def dataset(folder: Path) -> DatasetRef:
    return DatasetRef(
        path=str(folder), digest=folder.name, source="files", num_problems=8, num_rejected=1, num_images=3,
        max_prompt_tokens=9,
    )  # fmt: skip


def test_a_result_is_made_once_and_again_when_its_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    jobs: list[str] = []

    def make() -> DatasetRef:
        folder = tmp_path / f"made-{len(jobs)}"
        folder.mkdir()
        (folder / "report.json").touch()
        jobs.append(folder.name)
        return dataset(folder)

    assert made("prepare-a", None, make, DatasetRef) == made("prepare-a", None, make, DatasetRef)
    assert jobs == ["made-0"]
    made("prepare-b", None, make, DatasetRef)
    assert jobs == ["made-0", "made-1"], "another key is another result"
    (tmp_path / "made-0" / "report.json").unlink()
    assert made("prepare-a", None, make, DatasetRef).path == str(tmp_path / "made-2")
    assert made("prepare-a", None, make, DatasetRef).path == str(tmp_path / "made-2")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "other"))
    made("prepare-a", None, make, DatasetRef)
    assert jobs[3:] == ["made-3"], "another data folder has its own results"


def test_a_failed_job_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))

    def fail() -> ModelRef:
        raise ServerError("away")

    with pytest.raises(ServerError):
        made("merge-a", None, fail, ModelRef)
    (tmp_path / "config.json").touch()
    ref = START.model_copy(update={"path": str(tmp_path)})
    assert made("merge-a", None, lambda: ref, ModelRef) == ref


def test_data_are_prepared_then_resized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, resized = dataset(tmp_path / "raw"), dataset(tmp_path / "resized")
    prepare, resize = Step(raw), Step(resized)
    monkeypatch.setattr(data, "prepare_dataset", prepare)
    monkeypatch.setattr(data, "resize_images", resize)
    assert data.prepare_and_resize(EXPERIMENT, "train") == resized
    assert prepare.calls == [(EXPERIMENT, "train")]
    assert resize.calls == [(EXPERIMENT, "train", raw)]


def test_the_sources_of_a_mixture_are_prepared_one_by_one_and_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = {"b": {"source": "b@train", "template": "math"}, "a": {"source": "a@train", "reward": {"name": "gsm8k"}}}
    config = load_experiment("grpo-geo3k-tiny", [f"data.mixture={json.dumps(mixture)}"])
    ready = [dataset(tmp_path / name) for name in ("a", "b", "mixed", "validation")]
    prepare, resize, mix = Step(*ready[:2], ready[3]), Step(*ready[:2], ready[3]), Step(ready[2])
    monkeypatch.setattr(data, "prepare_dataset", prepare)
    monkeypatch.setattr(data, "resize_images", resize)
    monkeypatch.setattr(data, "mix_datasets", mix)
    assert data.prepare_and_resize(config, "train") == ready[2]
    assert mix.calls == [(config, "train", {"a": ready[0], "b": ready[1]})]
    own = [(call[0].data.train, call[0].data.template, call[0].reward.name) for call in prepare.calls]
    assert own == [("a@train", "tiny", "gsm8k"), ("b@train", "math", "math")]
    assert data.prepare_and_resize(config, "validation") == ready[3], "no source has validation problems"
    assert prepare.calls[2] == (config, "validation")


def report_at(table: Path) -> EvalReport:
    return EvalReport(
        policy="p", step=8, dataset_digest="d", num_problems=1, samples_per_problem=1, accuracy=0, accuracy_low=0,
        accuracy_high=0, reward=0, reward_low=0, reward_high=0, truncated=0, ungraded=0, table=str(table), seconds=1,
    )  # fmt: skip


@pytest.mark.parametrize(("benchmark", "where"), [(None, "eval"), ("gsm8k", "eval/gsm8k")])
def test_the_numbers_of_an_evaluation_lie_under_its_benchmark(
    benchmark: str | None, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.parquet"
    table.touch()
    report, run = report_at(table), Run(run_id="run", run_dir=tmp_path, experiment=EXPERIMENT)
    evaluate, log = Step(report), Step(None)
    monkeypatch.setattr(evaluation, "evaluate_policy", evaluate)
    monkeypatch.setattr(evaluation, "log_evaluation", log)
    raw = dataset(tmp_path / "raw")
    assert evaluation.evaluate_and_log(run, EXPERIMENT, CHECKPOINT, START, raw, benchmark) == report
    assert evaluate.calls == [(EXPERIMENT, CHECKPOINT, START, raw)]
    assert log.calls == [(run, report, where, CHECKPOINT)]


def test_a_suite_is_the_runs_own_or_that_of_a_benchmark(tmp_path: Path) -> None:
    run = Run(run_id="run", run_dir=tmp_path, experiment=load_experiment(TINY, ["seed=7"]))
    assert suite_of(run, None) == run.experiment
    assert suite_of(run, None, ["evaluation.temperature=0.25"]).evaluation.temperature == 0.25
    wider = suite_of(run, None, workers=3)
    assert wider.resources.workers == 3
    assert wider.model_copy(update={"resources": run.experiment.resources}) == run.experiment
    other = load_experiment("grpo-gsm8k-tiny", ["evaluation.temperature=0.25"])
    suite = suite_of(run, "grpo-gsm8k-tiny", ["evaluation.temperature=0.25"])
    assert (suite.data, suite.reward, suite.evaluation) == (other.data, other.reward, other.evaluation)
    assert (suite.seed, suite.name, suite.model) == (7, TINY, run.experiment.model)
    assert suite_of(run, "grpo-gsm8k-tiny").evaluation == load_experiment("grpo-gsm8k-tiny").evaluation


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ablation:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    return open_ablation.fn(
        TINY, None, "study", points=[["training.learning_rate=1"], ["data.template=math"]], seeds=[1]
    )


def test_data_and_policies_of_all_points_are_made_once(study: Ablation, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ablation, "prepare_and_resize", lambda experiment, split: made.append((experiment.data, split)))
    monkeypatch.setattr(ablation, "bootstrap_policy", lambda model: made.append((model,)))
    monkeypatch.setattr(ablation, "check_model", lambda experiment, _: made.append((experiment.model, "checked")))
    ablation.share_inputs(study)
    experiments = [study.plan.point("base").experiment, study.plan.point("p02").experiment]
    assert made == [
        words
        for item in experiments
        for words in ((item.data, "train"), (item.data, "validation"), (item.model,), (item.model, "checked"))
    ]  # fmt: skip


def test_a_point_is_described_with_the_steps_of_the_whole(
    study: Ablation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, placed = Step("mlflow-7"), Step(None)
    monkeypatch.setattr(ablation, "describe_run", described)
    monkeypatch.setattr(ablation, "place_below", placed)
    (job, *_) = study.plan.jobs(["p01"], 0)
    run = open_run(load_experiment(TINY, ["training.steps=1"]), study.run_id(job), Settings())
    train, validation = (dataset(tmp_path / name) for name in ("train", "validation"))
    assert ablation.describe_point(study, job, run, train, validation, START) == "mlflow-7"
    whole = run.model_copy(update={"experiment": job.point.experiment_of(job.seed)})
    assert described.calls == [(whole, train, validation, START, None)]
    assert placed.calls == [(study, job, run)]


def test_points_that_fail_for_good_are_marked(study: Ablation, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = study.plan.jobs(["base", "p01"], 0)
    asked: list[tuple[Any, ...]] = []
    shown: list[int] = []

    def run_jobs(given: Ablation, wanted: Any, runner: Any, tick: Any) -> Any:
        asked.append((given, wanted, runner))
        tick()
        return [jobs[1]]

    class Progress:
        def __init__(self, *words: Any) -> None:
            asked.append(words)

        def __enter__(self) -> SimpleNamespace:
            return SimpleNamespace(show=shown.append)

        def __exit__(self, *_: object) -> None: ...

    marked = Step(None)
    monkeypatch.setattr(ablating, "run_jobs", run_jobs)
    monkeypatch.setattr(ablating, "AblationProgress", Progress)
    monkeypatch.setattr(ablating, "point_runner", lambda given, settings: (given, settings.data_dir))
    monkeypatch.setattr(ablating, "mark_point", marked)
    ablating.train_points.fn(study, ["base", "p01"], 0)
    assert [words[:2] for words in asked[:1]] == [("study", study.all_steps())]
    assert asked[1:] == [(study, jobs, (study, Settings().data_dir))]
    assert shown == [0]
    assert marked.calls == [(study, jobs[1], "failed")]


class Recorder:
    """Stands for MLflow's tracker."""

    def __init__(self) -> None:
        self.files: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.tables: dict[str, dict[str, list[Any]]] = {}

    def log_file(self, path: Path, where: str) -> None:
        self.files.append((path.name, where))

    def log_text(self, text: str, where: str) -> None:
        self.texts[where] = text

    def log_table(self, table: dict[str, list[Any]], where: str) -> None:
        self.tables[where] = table

    def artifact_names(self, where: str) -> list[str]:
        return [name for name in self.tables if name.startswith(where)]


def test_a_report_keeps_traces_and_samples_in_mlflow(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    for name in ("b.json.gz", "a.json.gz", "notes.txt"):
        (tmp_path / "profiles" / name).touch()
    run = Run(run_id="run", run_dir=tmp_path, experiment=EXPERIMENT)
    samples = [
        Sample(
            step=step,
            problem_id="p",
            question="2+2?",
            answer="4",
            images=(),
            completion="4!",
            tokens=2,
            finish_reason="stop",
            reward=0.5,
            parts={},
            graded=True,
        )  # fmt: skip
        for step in (1, 8)
    ]
    tracker: Any = Recorder()
    segment: Any = SimpleNamespace(checkpoint=CHECKPOINT)
    for _ in range(2):
        reporting._log(tracker, run, "# Report", samples, [segment], START)
    once = [("report.html", "report"), ("curves.png", "report"), ("a.json.gz", "profiles"), ("b.json.gz", "profiles")]
    assert tracker.files == once * 2
    assert tracker.texts["report/report.md"] == "# Report"
    assert json.loads(tracker.texts["references.json"]) == {
        "checkpoints": [CHECKPOINT.model_dump()], "model": START.model_dump(), "run_dir": str(tmp_path),
    }  # fmt: skip
    assert tracker.tables == {
        "samples/completions.json": {
            "step": [1, 8], "question": ["2+2?"] * 2, "answer": ["4"] * 2, "completion": ["4!"] * 2,
            "reward": [0.5] * 2, "finish_reason": ["stop"] * 2,
        }
    }  # fmt: skip
    empty: Any = Recorder()
    reporting._log(empty, run, "# Report", [], [segment], START)
    assert empty.tables == {}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    return open_run(EXPERIMENT, "run", Settings())


def test_missing_steps_are_published_by_a_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published: list[int] = []
    stopped: list[float | None] = []
    checked: list[tuple[Any, ...]] = []

    def publishers(wanted: Run, settings: Settings) -> SimpleNamespace:
        assert (wanted, settings) == (run, Settings())
        return SimpleNamespace(publish_last=published.append, stop=stopped.append)

    monkeypatch.setattr(publishing, "Publishers", publishers)
    monkeypatch.setattr(publishing, "check_installed", lambda *words: checked.append(words))
    monkeypatch.setattr(Run, "committed_step", lambda _: 7)
    monkeypatch.setenv("RLFLOW_TRACKERS", "tensorboard")
    app(["publish", "run"], standalone_mode=False)
    assert (published, stopped) == ([7], [None])
    assert checked == [("tensorboard", Settings().tracker_python)]
    with pytest.raises(SystemExit, match=r"^ConfigError: no run 'gone' under .*Found: run\.$"):
        app(["publish", "gone"], standalone_mode=False)
    with pytest.raises(SystemExit):
        app(["publish"], prog_name="rlflow")
    assert "rlflow publish" in capsys.readouterr().err


def test_another_tracker_gets_the_runs_experiment(run: Run) -> None:
    settings = Settings(trackers="tensorboard")
    publishers = Publishers(run, settings)
    tracker, publisher = publishers._extra["tensorboard"], publishers._publishers["tensorboard"]
    assert vars(tracker) | {"_process": None} == vars(
        publishing.ExtraTracker(
            "tensorboard", settings, experiment=TINY, run_id="run", run_dir=run.run_dir, config=run.experiment.flat()
        )
    )
    assert (publisher._name, publisher._hint, publisher._open()) == ("tensorboard", "", tracker)
    assert list(publisher._records()) == []


def test_what_another_tracker_lacks_at_the_end_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLFLOW_TRACKERS", "tensorboard")
    publishers = Publishers(run, Settings())
    asked: list[tuple[str, int, float]] = []
    stopped: list[str] = []

    def publish_last(self: Publisher, through_step: int, wait_seconds: float) -> None:
        asked.append((self._name, through_step, wait_seconds))
        if self._name != "MLflow":
            raise ServerError("tensorboard is away.")

    monkeypatch.setattr(Publisher, "publish", lambda *_: None)
    monkeypatch.setattr(Publisher, "publish_last", publish_last)
    monkeypatch.setattr(publishing.ExtraTracker, "stop", lambda self: stopped.append(self._name))
    publishers.publish_last(5)
    assert asked == [("MLflow", 5, Settings().tracking_wait_seconds), ("tensorboard", 5, 120.0)]
    assert stopped == ["tensorboard"]
    assert caplog.messages == ["tensorboard is away. The run is complete without it; tensorboard may catch up later."]
    publishers.stop()


def test_a_benchmark_that_is_not_there_is_named_with_those_that_are() -> None:
    known = [item.name for item in benchmarks.load_benchmarks()]
    said = f"^no benchmark a, b in prefect.yaml. Found there: {', '.join(known)}.$"
    with pytest.raises(benchmarks.ConfigError, match=said):
        benchmarks.load_benchmarks(["b", known[0], "a"])


def test_the_reference_is_written_to_a_file(tmp_path: Path) -> None:
    app(["docs", str(tmp_path / "page.md")], standalone_mode=False)
    assert (tmp_path / "page.md").read_text() == reference.page()


def test_a_trainer_of_another_driver_that_is_gone_has_no_exit_code(tmp_path: Path) -> None:
    code = Trainer(1, tmp_path / "lease.json", None).exit_code()
    assert code == UNKNOWN_EXIT
    assert "signal" not in describe_exit(code)
    assert isinstance(error_of_exit(code, describe_exit(code)), WorkerLostError)
    child: Any = SimpleNamespace(poll=lambda: 7)
    assert Trainer(1, tmp_path / "lease.json", child).exit_code() == 7
    assert last_words(tmp_path / "trainer.log") == ""
