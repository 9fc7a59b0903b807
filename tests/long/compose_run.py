"""Run among namespaces (``hosts.inside``): the stack of compose.yaml, a demo through it, and the end of each service.

Leaves in ``happened.json`` of the shared folder what the test looks at.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.server import get_app_client

from rlcore.segment.journal import read_journal
from tests.long.compose_file import read_compose, read_variables
from tests.long.compose_stack import Project
from tests.long.hosts import ROOT, SHARED

DOCKER = ROOT / "infra" / "deploy" / "docker"
EXPERIMENT = "grpo-gsm8k-tiny"
STEPS = 90  # more than a loaded machine trains until every service is back
SERVERS = ("postgres", "objects", "mlflow", "prefect", "worker-cpu")
# Random weights never give a right answer, so letters are counted. The pause gives the servers time to come back.
_REWARD = """import time
def reward(text, problem, num_tokens, finish_reason):
    time.sleep(0.15)
    return sum(map(str.isalpha, text)) / max(1, len(text))
"""
_SETTINGS = [
    "model.tiny.warm_start_steps=0",
    "data.template=tiny",
    "data.synthetic_problems=64",
    "segment.steps=10",
    "training.problems_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_tokens=16",
    "evaluation.samples=1",
    "evaluation.problems=4",
    "resources.workers=1",
    "recovery.silence_seconds=60",
    "reward.name=user",
    "reward.file=/data/letters.py",
    "health=[]",
]


def variables(data: Path) -> dict[str, str]:
    """.env.example, filled in as it says."""
    found = read_variables(DOCKER / ".env.example")
    made = {name: secrets.token_hex(10 if name.startswith("S3") or "_S3_" in name else 24) for name in found}
    filled = {name: value or made[name] for name, value in found.items()}
    # A second slot, or a run that recover brings back waits until each checkpoint is evaluated.
    filled["GPU_SLOTS"] = "2"
    return filled | {"PREFECT_AUTH": f"user:{secrets.token_hex(24)}", "DATA_DIR": str(data)}


def main() -> None:
    data, folder = SHARED / "data", SHARED / "compose"
    for path in (data, folder):
        path.mkdir()
    os.chown(data, 1000, 1000)
    (data / "letters.py").write_text(_REWARD)
    env = variables(data)
    project = Project(read_compose(DOCKER / "compose.yaml", env), folder, DOCKER)
    seconds: dict[str, float] = {}
    began = time.monotonic()

    def mark(name: str) -> None:
        seconds[name] = round(time.monotonic() - began, 1)
        sys.stderr.write(f"{seconds[name]:7.1f} {name}\n")

    try:
        project.up()
        mark("up")
        refused = {"prefect": status("4200/api/flows/count", "POST"), "mlflow": status("5000/api/2.0/mlflow/users/get")}
        said = project.exec(
            "worker", "prefect", "deployment", "run", f"train-grpo/{EXPERIMENT}",
            "-p", f"steps={STEPS}", "-p", f"overrides={json.dumps(_SETTINGS)}",
        )  # fmt: skip
        flow_run_id = re.findall(r"UUID: (\S+)", said)[0]
        run_dir = data / "runs" / f"{EXPERIMENT}-{flow_run_id.replace('-', '')[:12]}"

        def steps() -> int:
            return len(read_journal(run_dir / "journal.jsonl"))

        killed = {}
        for number, name in enumerate(SERVERS, 1):
            project.wait_for(lambda number=number: steps() >= 2 * number, f"step {2 * number}")
            if name == "worker-cpu":  # a worker that starts while Prefect is away ends at once, any number of times
                project.wait_for(lambda: project.running["prefect"].state == "healthy", "Prefect is back")
            killed[name] = steps()
            project.kill(name)
            mark(f"{name} killed at step {killed[name]}")
        project.wait_until_up()
        mark("all are up again")
        before = recoveries(run_dir)
        killed["worker"] = steps()
        project.kill("worker")
        mark(f"worker killed at step {killed['worker']}")
        project.wait_for(lambda: recoveries(run_dir) > before, "recovery")
        taken = killed["worker"] + 2
        project.wait_for(lambda: steps() >= taken, f"step {taken} by another trainer")
        mark("the run is back")
        stopped = stop_worker(project, run_dir)
        mark("worker stopped")
        project.start("worker")
        project.wait_for((run_dir / "finished").exists, "the end of the run", 1200)
        mark("finished")
        for name in ("bucket", "mlflow-user"):
            project.run_again(name)
        mark("again")
        happened = {
            "refused": refused,
            "killed": killed,
            "stopped": stopped,
            "seconds": seconds,
            "starts": {name: found.starts for name, found in project.running.items()},
            "steps": [record.step for record in read_journal(run_dir / "journal.jsonl")],
            **tracked(env, run_dir.name),
        }
        (SHARED / "happened.json").write_text(json.dumps(happened))
    finally:
        mark("end")
        project.down()


def recoveries(run_dir: Path) -> int:
    noted = run_dir / "recoveries.jsonl"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def stop_worker(project: Project, run_dir: Path) -> dict[str, float]:
    journal = run_dir / "journal.jsonl"
    step = read_journal(journal)[-1].step
    seconds = project.stop("worker")
    allowed = project.services["worker"].stop_seconds
    committed = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*[0-9]")]
    return {"step": step, "seconds": seconds, "allowed": allowed, "committed": max(committed, default=0)}


def tracked(env: Mapping[str, str], run_id: str) -> dict[str, object]:
    """What MLflow tells its administrator at the port of this machine."""
    os.environ |= {
        "MLFLOW_TRACKING_USERNAME": "admin",
        "MLFLOW_TRACKING_PASSWORD": env["MLFLOW_ADMIN_PASSWORD"],
    }
    client = MlflowClient("http://127.0.0.1:5000")
    experiment = client.get_experiment_by_name(EXPERIMENT)
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`rlflow.run_id` = '{run_id}'")
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    versions = [item for item in client.search_model_versions() if item.run_id == run.info.run_id]
    files = [item for item in client.list_artifacts(run.info.run_id) if not item.is_dir]
    return {
        "tracked": sorted(point.step for point in points),
        "status": run.info.status,
        "worker is admin": get_app_client("basic-auth", "http://127.0.0.1:5000").get_user("rlflow").is_admin,
        "registered": sorted((int(version.tags["rlflow.step"]), version.status) for version in versions),
        "artifact": files[0].file_size,  # as the object store lists it
    }


def status(path: str, method: str = "GET") -> int:
    """What a server answers to somebody without a password, at the port of this machine."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{path}", method=method), timeout=20
        ) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


if __name__ == "__main__":
    if os.getpid() == 1:
        # A process of a health check that took too long becomes a child of process 1. Until it is reaped, the container
        # that it was in cannot end.
        init = Path(__file__).with_name("images") / "init.py"
        os.execv(sys.executable, [sys.executable, str(init), sys.executable, "-m", "tests.long.compose_run"])
    main()
