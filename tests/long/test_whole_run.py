"""The tiny policy by its deployment, with real Ray, FSDP2 and vLLM: killed, brought back, evaluated, merged, verified,
registered; and from the registered model back to every picture. Secrets lie all around it, and none is in anything that
it leaves."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from PIL import Image
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

from infra import processes
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.segment.store import LocalCheckpointStore
from tasks.cli import app
from tasks.run import existing_run
from tests.long.prefect_stack import ROOT, Stack, assert_whole, prefect_stack
from tests.stores import BUCKET, Parts, postgres_programs

pytestmark = [pytest.mark.stacks, pytest.mark.timeout(2400)]

PROBLEMS = 8
TINY = (
    *("model.tiny.warm_start_steps=0", "data.template=tiny", "training.steps=4", "segment.steps=2"),
    *("training.problems_per_batch=4", "training.mini_batches=2", "rollout.group_size=2"),
    *("rollout.max_completion_tokens=8", "training.tokens_per_microbatch=1024"),
    *("evaluation.problems=4", "evaluation.samples=1", "resources.workers=1"),
)


@dataclass(frozen=True, slots=True)
class Place:
    stack: Stack
    folder: Path
    parts: Parts
    variables: dict[str, str]
    planted: dict[str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, parts: Parts) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("whole")
    planted = {
        "AWS_ACCESS_KEY_ID": secrets.token_hex(10),
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        "MLFLOW_TRACKING_USERNAME": "researcher",
        "MLFLOW_TRACKING_PASSWORD": secrets.token_hex(12),
        "HF_TOKEN": f"hf_{secrets.token_hex(16)}",
        "WANDB_API_KEY": secrets.token_hex(20),
    }
    variables = dict(parts.variables("whole"))
    planted |= {name: variables[name] for name in planted.keys() & variables.keys()}
    environment = {"RLFLOW_TRAINER_PYTHON": sys.executable, **planted, **variables}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**planted, **variables}.items():
            patch.setenv(name, value)  # the test reads the run as somebody on this machine would
        patch.setenv("RLFLOW_DATA_DIR", str(folder / "data"))
        with prefect_stack(folder, environment) as stack:
            yield Place(stack, folder, parts, variables, planted)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn problems as somebody's own data: two lists, and pictures beside them."""
    folder = tmp_path_factory.mktemp("source")
    for split in ("train", "validation"):
        rows = []
        for index in range(PROBLEMS):
            drawn = draw_problem(split, index, 0)
            picture = folder / f"{split}-{index}.png"
            drawn.picture.save(picture)
            rows.append({"problem": f"<image>{drawn.question}", "answer": drawn.answer, "images": [str(picture)]})
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def ended(place: Place, source: Path) -> UUID:
    """A flow run whose flow and trainer were killed after the first commit, and that ended all the same."""
    stack = place.stack
    data = [f"data.{split}={source / f'{split}.jsonl'}" for split in ("train", "validation")]
    flow_run_id = stack.submit(*TINY, *data)
    segments = stack.run_dir(flow_run_id) / "segments"
    stack.wait_for(lambda: (segments / "0000.json").exists(), "the first commit", seconds=900)
    stack.driver(stack.run_dir(flow_run_id)).kill()
    processes.kill(existing_run(stack.run_dir(flow_run_id).name, stack.settings).trainer_mark)
    stack.wait_for_state(flow_run_id, StateType.COMPLETED, seconds=900)
    return flow_run_id


def test_a_killed_run_ends_whole_evaluated_and_registered(place: Place, ended: UUID) -> None:
    stack = place.stack
    assert stack.flow_run(ended).run_count == 2
    assert_whole(stack, ended)
    run = existing_run(stack.run_dir(ended).name, stack.settings)
    client = MlflowClient(tracking_uri=stack.settings.tracking_uri, registry_uri=stack.settings.tracking_uri)
    version = client.get_model_version_by_alias("grpo-geo3k-tiny", "verified")
    assert version.tags["rlflow.run_id"] == run.run_id
    points = client.get_metric_history(version.run_id, "eval/accuracy")
    assert sorted(point.step for point in points) == [0, 2, 4]
    artifacts = {item.path for item in client.list_artifacts(version.run_id, "report")}
    assert "report/report.html" in artifacts
    if place.parts.s3 is not None:
        objects = [name.partition("/whole_")[2] for name in place.parts.s3.files().find(BUCKET)]
        below = [name.partition("/")[2] for name in objects]
        kept = [path.name for path in LocalCheckpointStore(run.run_dir, run.run_id).newest_first()]
        assert {f"runs/{run.run_id}/checkpoints/{name}/.sealed.json" for name in kept} <= set(below)
        assert any(name.startswith("mlflow/") and name.endswith("report/report.html") for name in below)
        assert f"runs/{run.run_id}/validation/step-000004/report.json" in below
        for kind in ("datasets", "models/tiny-", "models/merged-"):
            assert any(name.startswith(kind) and name.endswith("/.sealed.json") for name in below), kind


def lineage(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    app(["lineage", *words, "--json"], standalone_mode=False)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_its_model_leads_to_the_rows_and_pictures_of_a_step(
    place: Place, ended: UUID, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = place.stack.run_dir(ended)
    found = lineage(capsys, "grpo-geo3k-tiny@verified", "--step", "2")
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    assert len(found["trained"]) == 2  # two updates share a batch of four problems
    for item in found["trained"]:
        given = rows[item["row"]]
        assert given["problem"].replace("<image>", "") in item["question"]
        assert item["answer"] == given["answer"]
        (used,), (original,) = item["images"], item["image_sha256"]
        assert original == hashlib.sha256(Path(given["images"][0]).read_bytes()).hexdigest()
        with Image.open(used) as picture:
            assert picture.mode == "RGB"

    batch = json.loads((run_dir / "samples" / "step-000002.json").read_text())
    first, second = (
        [item["problem_id"] for item in lineage(capsys, "grpo-geo3k-tiny/1", "--step", str(step))["trained"]]
        for step in (1, 2)
    )
    assert not set(first) & set(second)
    assert list(dict.fromkeys(row["problem_id"] for row in batch)) == first  # the first two of the batch

    assert found["checkpoint"]["path"] == str(run_dir / "checkpoints" / "step-000004")
    assert Path(found["model"]["path"]).parent == run_dir.parents[1] / "models"
    assert [(s["first_step"], s["last_step"]) for s in found["segments"]] == [(0, 2), (2, 4)]
    origin = found["origins"][-1]
    assert origin["train"]["num_problems"] == PROBLEMS
    assert origin["train"]["digest"] == json.loads((run_dir / "spec.json").read_text())["dataset"]["digest"]
    assert (run_dir / "origins" / origin["template"]).read_text().startswith("{{ content }}")
    assert "torch==" in (run_dir / "origins" / origin["environment"]).read_text()
    assert found["checkpoint_code_digest"]
    assert found["experiment"]["training.steps"] == 4


def test_it_says_what_it_cost_on_its_page_and_in_mlflow(place: Place, ended: UUID) -> None:
    stack = place.stack
    client = MlflowClient(tracking_uri=stack.settings.tracking_uri, registry_uri=stack.settings.tracking_uri)
    version = client.get_model_version_by_alias("grpo-geo3k-tiny", "verified")
    metrics = client.get_run(version.run_id).data.metrics
    phases = {name: value for name, value in metrics.items() if name.startswith("cost/gpu_seconds/")}
    assert {"cost/gpu_seconds/generate", "cost/gpu_seconds/update", "cost/gpu_seconds/weight_sync"} <= phases.keys()
    spent = sum(phases.values()) + metrics["cost/evaluation_gpu_seconds"] + metrics["cost/redone_gpu_seconds"]
    assert metrics["cost/gpu_hours"] == pytest.approx(spent / 3600)
    assert 0 < metrics["cost/generated_tokens"] <= 2 * 8 * 8  # two batches of eight completions of at most eight tokens
    assert 0 < metrics["cost/in_step_share"] <= 1
    page = (stack.run_dir(ended) / "report" / "report.html").read_text()
    assert "<h2>Cost</h2>" in page
    assert "<h2>Lineage</h2>" in page
    assert "segment 1" in page


def test_unknown_models_aliases_and_steps_are_named(ended: UUID) -> None:
    for words, said in (
        (["nothing"], "no registered model 'nothing'"),
        (["grpo-geo3k-tiny@best"], "has the versions 1 and the aliases {'verified': "),
        (["grpo-geo3k-tiny", "--step", "9"], "nothing is known of step 9: batches up to step 4 are noted"),
    ):
        with pytest.raises(SystemExit, match=re.escape(said)):
            app(["lineage", *words], standalone_mode=False)


def test_the_command_shows_its_lineage_to_people(place: Place, ended: UUID) -> None:
    command = [sys.executable, "-m", "tasks.cli", "lineage", "grpo-geo3k-tiny", "--step", "1"]
    said = subprocess.run(command, env=place.stack.env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^segment 1 +steps 3 to 4", said, re.MULTILINE)
    assert re.search(r"^code .* commit", said, re.MULTILINE)
    assert len(re.findall(r"\.png$", said, re.MULTILINE)) == 2


def test_prefect_refuses_a_secret_among_the_parameters_and_does_not_keep_it(place: Place) -> None:
    deployment = place.stack.client.read_deployment_by_name("train-grpo/grpo-geo3k-tiny")
    for override in (f"data.train=s3://me:{place.planted['HF_TOKEN']}@bucket/x", f"model.path={_token()}"):
        parameters = {**deployment.parameters, "overrides": [override]}
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            place.stack.client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def _token() -> str:
    return "hf_" + "plantedtoken" * 3


def test_no_secret_is_in_anything_that_the_run_leaves(place: Place, ended: UUID) -> None:
    needles = {name: value for name, value in place.planted.items() if name != "MLFLOW_TRACKING_USERNAME"}
    needles["token in an override"] = _token()
    for name in ("RLFLOW_PREFECT_DATABASE", "RLFLOW_MLFLOW_DATABASE"):
        if name in place.variables:
            needles[name] = place.variables[name].partition("@")[0].rpartition(":")[2]
    seen: set[str] = set()
    found = []
    for where, content in _everything(place):
        seen.add(where.partition(":")[0])
        found += [f"{name} in {where}" for name, value in needles.items() if value.encode() in content]
    assert not found
    assert seen == ({"file", "object", "database"} if place.variables else {"file"})


def _everything(place: Place) -> Iterator[tuple[str, bytes]]:
    """Name and content of all files, objects and databases. SQLite's databases are files."""
    for path in place.folder.rglob("*"):
        if path.is_file():
            yield f"file:{path.relative_to(place.folder)}", path.read_bytes()
            if path.suffix == ".gz":
                yield f"file:{path.relative_to(place.folder)}", gzip.decompress(path.read_bytes())
    if place.parts.s3 is not None:
        files = place.parts.s3.files()
        for name in files.find(BUCKET):
            yield f"object:{name}", files.cat_file(name)
    for name in ("RLFLOW_PREFECT_DATABASE", "RLFLOW_MLFLOW_DATABASE"):
        if name in place.variables:
            command = [postgres_programs() / "pg_dump", place.variables[name]]
            yield f"database:{name}", subprocess.run(command, capture_output=True, check=True, env=os.environ).stdout


def test_the_run_would_show_what_it_is_searched_for(place: Place, ended: UUID) -> None:
    """The search itself: the run's name is in files, objects and databases."""
    needle = place.stack.run_dir(ended).name.encode()
    kinds = {where.partition(":")[0] for where, content in _everything(place) if needle in content}
    assert kinds == ({"file", "object", "database"} if place.variables else {"file"})
