"""What people are shown of a run on Prefect's pages, as it is handed to Prefect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.schemas.objects import StateType
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.errors import ServerError, ServerRefusedError, StorageError
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.config import RecoveryConfig, build_experiment
from rlcore.errors import ConfigError
from rlcore.segment.health import Breach
from rlcore.segment.spec import SegmentManifest
from tasks import preflight
from tasks.driver import health, progress
from tasks.driver.failures import note_outage
from tasks.driver.health import announce_on_prefect
from tasks.driver.outbox import prefect_outage_named
from tasks.driver.progress import TrainingProgress, announce_checkpoint, show_on_page
from tasks.experiments import load_experiment
from tasks.recovery import act as recovering
from tasks.recovery.decide import Action, Decision, Facts, FlowRunFacts, LastFailure
from tasks.run import Run
from tasks.store import made as stored

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


class Recorder:
    """Stands for a call of Prefect's; fails with ``error``."""

    def __init__(self, answer: object = None, error: Exception | None = None) -> None:
        self.calls: Calls = []
        self.answer, self.error = answer, error

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return self.answer


AWAY = httpx.ConnectError("nobody answers")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(run_id="lr-3", run_dir=tmp_path, experiment=build_experiment({"name": "toy"}, []))


@pytest.fixture
def breach() -> Breach:
    rules = '[{"metric": "reward/mean", "below": 0.5, "action": "warn"}]'
    experiment = load_experiment("grpo-geo3k-tiny", [f"health={rules}"])
    (rule,) = experiment.health
    return Breach(rule=rule, step=3, values=((3, 0.25),), best=None)


def test_a_committed_segment_is_an_event_of_its_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emitted = Recorder()
    monkeypatch.setattr(progress, "emit_event", emitted)
    checkpoint = CheckpointRef(path="/c", step=8, policy_version=8, manifest_sha256="m", run_id="lr-3", segment=2)
    manifest = SegmentManifest(
        run_id="lr-3", segment=2, first_step=6, last_step=8, complete=True, checkpoint=checkpoint,
        experiment_digest="e", dataset_digest="d",
    )  # fmt: skip
    announce_checkpoint(run, manifest)
    ((name,), told) = emitted.calls[0]
    assert name == "rlflow.checkpoint.committed"
    assert told == {
        "resource": {"prefect.resource.id": "rlflow.run.lr-3", "prefect.resource.name": "lr-3"},
        "payload": {"experiment": "toy", "segment": 2, "step": 8},
    }
    monkeypatch.setattr(progress, "emit_event", Recorder(error=AWAY))
    announce_checkpoint(run, manifest)
    assert caplog.messages == ["Prefect does not accept events for now: nobody answers"]


def test_a_broken_health_rule_is_an_event_and_a_page(
    run: Run, breach: Breach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emitted, made = Recorder(), Recorder()
    monkeypatch.setattr(health, "emit_event", emitted)
    monkeypatch.setattr(health, "create_markdown_artifact", made)
    announce_on_prefect(run, breach, "Training goes on.")
    ((name,), told) = emitted.calls[0]
    assert name == "rlflow.health.warn"
    assert told == {
        "resource": {"prefect.resource.id": "rlflow.run.lr-3", "prefect.resource.name": "lr-3"},
        "payload": {
            "rule": str(breach.rule), "step": 3, "values": [(3, 0.25)], "consequence": "Training goes on.",
        },
    }  # fmt: skip
    ((page,), about) = made.calls[0]
    assert about == {"key": "toy-health"}
    assert page == health.page(run, breach, "Training goes on.")
    assert page.startswith(f"# Health of lr-3\n\nStep 3 broke the rule **{breach.rule}**.\n\nTraining goes on.\n")
    assert page.endswith("| step | reward/mean |\n| ---: | ---: |\n| 3 | 0.25 |\n")
    assert caplog.messages == [f"health: {breach}. Training goes on."]
    monkeypatch.setattr(health, "create_markdown_artifact", Recorder(error=AWAY))
    announce_on_prefect(run, breach, "Training goes on.")
    assert caplog.messages[-1] == "Prefect does not accept the health page for now: nobody answers"


def test_the_progress_is_one_artifact_that_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = UUID(int=7)
    made, changed = Recorder(answer=artifact), Recorder()
    monkeypatch.setattr(progress, "create_progress_artifact", made)
    monkeypatch.setattr(progress, "update_progress_artifact", changed)
    assert show_on_page(None, "toy-progress", 25.0, "reward 0.5") is None, "no task is at work, so there is no page"
    assert made.calls == []
    with TaskRunContext.model_construct(task_run=None):
        assert show_on_page(None, "toy-progress", 25.0, "reward 0.5") == artifact
        assert made.calls == [((25.0,), {"key": "toy-progress", "description": "reward 0.5"})]
        assert show_on_page(artifact, "toy-progress", 50.0, "reward 0.6") == artifact
        assert changed.calls == [((artifact, 50.0), {"description": "reward 0.6"})]
        monkeypatch.setattr(progress, "update_progress_artifact", Recorder(error=AWAY))
        assert show_on_page(artifact, "toy-progress", 50.0, "reward 0.6") == artifact
    assert len(made.calls) == 1
    assert caplog.messages == ["Prefect does not accept the progress for now: nobody answers"]


@pytest.fixture
def _no_prefect_server() -> Iterator[None]:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.mark.usefixtures("_no_prefect_server")
def test_what_preflight_has_found_is_a_page_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    made = Recorder()
    monkeypatch.setattr(preflight, "create_markdown_artifact", made)
    monkeypatch.setattr(preflight, "_reward", lambda *_: "math")
    report = preflight.preflight.fn(build_experiment({"name": "toy"}, []))
    ((page,), about) = made.calls[0]
    assert about == {"key": "toy-preflight"}
    assert page == report.markdown()
    lines = page.splitlines()
    assert lines[:2] == ["| checked | found |", "| --- | --- |"]
    assert lines[2:] == [f"| {name} | {fact} |" for name, fact in report.facts.items()]
    assert report.facts["store"] == "none; everything stays in the data folder"
    assert report.facts["Prefect"] == "embedded"
    assert caplog.messages == [f"check: {name}: {fact}" for name, fact in report.facts.items()]


def judged(run_id: str, action: Action, **facts: Any) -> recovering.Judged:
    known = Facts(
        run_id=run_id,
        finished=False,
        steps=10,
        committed_step=4,
        flow_run=None,
        driver_running=None,
        silent_seconds=5.0,
        sign_seen=False,
        trainer=None,
        failure=None,
        outage=None,
        recoveries=1,
        allowed=RecoveryConfig(attempts=3, silence_seconds=120.0),
    )
    run = Run(run_id=run_id, run_dir=Path("/"), experiment=build_experiment({"name": "toy"}, []))
    return run, replace(known, **facts), Decision(action, "so.")


def test_what_recover_has_decided_is_a_table_with_a_row_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder()
    monkeypatch.setattr(recovering, "create_table_artifact", made)
    recovering.show_decisions.fn([])
    assert made.calls == []
    crashed = FlowRunFacts(flow_run_id="f", state_id="s", state=StateType.CRASHED, deployed=True)
    failure = LastFailure("hang", final=False)
    recovering.show_decisions.fn(
        [
            judged("a", Action.LEAVE),
            judged("b", Action.RESCHEDULE, flow_run=crashed, driver_running=False, trainer="pid 7", failure=failure),
        ]
    )
    ((table,), about) = made.calls[0]
    assert about["key"] == recovering.ARTIFACT
    assert table == [
        {
            "run": "a", "step": "4 of 10", "Prefect": "-", "driver": "on another host", "trainer": "-",
            "last failure": "-", "recoveries": "1 of 3", "decision": "leave", "why": "so.",
        },
        {
            "run": "b", "step": "4 of 10", "Prefect": "CRASHED", "driver": "gone",
            "trainer": "pid 7", "last failure": "hang", "recoveries": "1 of 3", "decision": "reschedule", "why": "so.",
        },
    ]  # fmt: skip


def answer_of(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://prefect/api")
    return httpx.HTTPStatusError(f"code {code}", request=request, response=httpx.Response(code, request=request))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (answer_of(401), ServerRefusedError, r"^Prefect refuses \(HTTPStatusError: code 401\)\.$"),
        (answer_of(499), ServerRefusedError, "refuses"),
        (answer_of(500), ServerError, r"^Prefect does not answer \(HTTPStatusError: code 500\)\. Start its server\.$"),
        (AWAY, ServerError, "does not answer"),
    ],
)
def test_a_server_that_refuses_differs_from_one_that_is_unreachable(
    error: Exception, kind: type[ServerError], said: str
) -> None:
    with pytest.raises(ServerError, match=said) as raised, prefect_outage_named():
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


@pytest.mark.usefixtures("_no_prefect_server")
def test_preflight_looks_at_the_trackers_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Recorder(answer="tensorboard 2")
    monkeypatch.setattr(preflight, "check_installed", asked)
    monkeypatch.setattr(preflight, "_reward", lambda *_: "math")
    experiment = build_experiment({"name": "toy"}, [])
    settings = Settings(data_dir=tmp_path, trackers=("tensorboard", "wandb"))
    assert preflight.check(experiment, settings).facts["trackers"] == "tensorboard 2, tensorboard 2"
    assert asked.calls == [(("tensorboard", settings.tracker_python), {}), (("wandb", settings.tracker_python), {})]
    assert "trackers" not in preflight.check(experiment, Settings(data_dir=tmp_path)).facts


def test_unreachable_servers_are_reported_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path)
    assert preflight.services_away(settings) == []
    asked = Recorder(error=ServerError("MLflow is away."))
    monkeypatch.setattr(preflight, "_store", Recorder(error=StorageError("The store is away.")))
    monkeypatch.setattr(preflight, "_mlflow", asked)
    assert preflight.services_away(settings) == ["The store is away.", "MLflow is away."]
    assert asked.calls == [((settings,), {})]
    run = Run(run_id="run", run_dir=tmp_path, experiment=build_experiment({"name": "toy"}, []))
    monkeypatch.setattr(recovering, "services_away", Recorder(answer=["a.", "b."]))
    assert recovering._outage(run) is None
    note_outage(run, ServerError("MLflow is away."))
    assert recovering._outage(run) == "a. b."


def test_outages_together_are_an_outage() -> None:
    found = preflight._combine([ServerError("a"), StorageError("b")])
    assert type(found) is ServerError
    assert str(found).endswith("- a\n- b")
    assert type(preflight._combine([ServerError("a"), ConfigError("b")])) is ConfigError
    assert type(preflight._combine([ConfigError("a"), ConfigError("b")])) is ConfigError


class Files:
    """A bucket of a store."""

    uri = "s3://bucket/lab"

    def __init__(self) -> None:
        self.log: list[tuple[str, str, bytes]] = []

    def put(self, key: str, content: bytes) -> None:
        self.log.append(("put", key, content))

    def discard(self, key: str) -> None:
        self.log.append(("discard", key, b""))


def test_a_store_is_written_to_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    monkeypatch.setattr(preflight, "store_of", Recorder(answer=files))
    assert preflight._store(Settings(data_dir=tmp_path)) == "s3://bucket/lab"
    (put, discarded) = files.log
    assert put[1].startswith(".preflight-")
    assert (put[0], put[2]) == ("put", b"")
    assert discarded == ("discard", put[1], b"")


def test_files_of_a_run_go_to_the_store_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    monkeypatch.setattr(stored, "patient_store_of", Recorder(answer=files))
    noted = tmp_path / "runs" / "lr-3" / "evaluations.jsonl"
    noted.parent.mkdir(parents=True)
    noted.write_text("{}")
    stored.send_file(noted, Settings(data_dir=tmp_path))
    assert files.log == [("put", "runs/lr-3/evaluations.jsonl", b"{}")]


def test_the_page_of_a_training_is_its_experiments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Recorder(answer="the artifact")
    monkeypatch.setattr(progress, "show_on_page", shown)
    page: Any = None
    bar = TrainingProgress(run.experiment, page)
    bar._show_on_page(50.0, "reward 0.5")
    bar._show_on_page(75.0, "reward 0.6")
    assert [args for args, _ in shown.calls] == [
        (None, "toy-progress", 50.0, "reward 0.5"), ("the artifact", "toy-progress", 75.0, "reward 0.6"),
    ]  # fmt: skip
