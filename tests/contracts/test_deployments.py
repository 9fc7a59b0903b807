"""Files for clusters that no machine of the tests can run: checked by the schemas and linters of those who read them,
and against what the code reads."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psycopg
import pytest
import yaml

from infra.deploy import Shape, k8s, vemlp
from infra.errors import DeploymentError
from infra.settings import Settings
from infra.stack.worker import AFTER_GRACE_SECONDS
from tasks.cli.deploy import cluster_files, documents, shape_of
from tasks.experiments import load_experiment
from tests.stores import postgres_server

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "infra" / "deploy"
DOCKER = DEPLOY / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text()
KUBERNETES = "1.34"
# Keys and types of a task file in samples/cifar/torch_ddp_task_conf.yaml.tpl of volcengine/ml-platform-sdk-python. What
# newer platforms also take (ImageUrl, ResourceQueueID, Priority, Preemptible, AccessType, RetryOptions) is in no
# published file, so no test says that these names are right.
VEMLP_SAMPLE = {
    "TaskName": str, "Description": str, "Entrypoint": str, "Tags": list, "Envs": list, "Framework": str,
    "TaskRoleSpecs": list, "ActiveDeadlineSeconds": int, "Storages": list,
}  # fmt: skip
VEMLP_ROLE = {"RoleName", "RoleReplicas", "Flavor"}
VEMLP_FRAMEWORKS = {"TensorFlowPS", "PyTorchDDP", "Horovod", "BytePS", "Custom"}
SHAPE = Shape("grpo-test", gpus=16, together=2, command=("rlflow", "train", "grpo-test"))


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def rlflow_variables(text: str) -> set[str]:
    return set(re.findall(r"RLFLOW_[A-Z_]+", text))


def known_settings() -> set[str]:
    return {f"RLFLOW_{name.upper()}" for name in Settings.model_fields}


def test_compose_keeps_to_the_compose_specification(tmp_path: Path) -> None:
    check = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    answer = tool(*check, str(DOCKER / "compose.yaml"))
    assert answer.returncode == 0, answer.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.replace("healthcheck:", "healthchek:", 1))
    assert tool(*check, str(wrong)).returncode == 1


def test_compose_takes_every_secret_from_the_env_file_and_listens_on_loopback() -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
    wanted = set(re.findall(r"\$\{([A-Z0-9_]+)", COMPOSE))
    offered = set(re.findall(r"^([A-Z0-9_]+)=", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    assert wanted == offered
    assert subprocess.run(["git", "check-ignore", "-q", str(DOCKER / ".env")], cwd=ROOT, check=False).returncode == 0
    secrets = [
        f"{service}: {name}"
        for service, content in services.items()
        for name, value in content.get("environment", {}).items()
        if re.search("PASSWORD|SECRET|KEY|AUTH_STRING", name) and "${" not in str(value)
    ]
    assert not secrets
    assert all(port.startswith("127.0.0.1:") for content in services.values() for port in content.get("ports", []))
    assert {name for name, content in services.items() if "healthcheck" in content} == {
        "postgres",
        "objects",
        "mlflow",
        "prefect",
    }


def test_no_service_of_compose_holds_more_than_its_own_secrets() -> None:
    services: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
    holders: dict[str, set[str]] = {}
    for service, content in services.items():
        for secret in re.findall(r"\$\{([A-Z0-9_]+)", json.dumps(content.get("environment", {}))):
            holders.setdefault(secret, set()).add(service)
    clients = {"deploy", "worker", "worker-cpu"}
    assert {name: found for name, found in holders.items() if not name.endswith(("_PORT", "_SLOTS"))} == {
        "POSTGRES_PASSWORD": {"postgres"},
        "PREFECT_DB_PASSWORD": {"postgres", "prefect"},
        "MLFLOW_DB_PASSWORD": {"postgres", "mlflow"},
        "MLFLOW_USERS_DB_PASSWORD": {"postgres", "mlflow"},
        "S3_ROOT_ACCESS_KEY": {"objects", "bucket"},
        "S3_ROOT_SECRET_KEY": {"objects", "bucket"},
        "MLFLOW_S3_ACCESS_KEY": {"bucket", "mlflow"},
        "MLFLOW_S3_SECRET_KEY": {"bucket", "mlflow"},
        "MLFLOW_ADMIN_PASSWORD": {"mlflow", "mlflow-user"},
        "MLFLOW_SECRET_KEY": {"mlflow"},
        "MLFLOW_WORKER_PASSWORD": {"mlflow-user", *clients},
        "PREFECT_AUTH": {"prefect", *clients},
    }
    addresses = re.findall(r"postgresql\+\w+://(\w+):\$\{(\w+)\}@postgres/(\w+)", COMPOSE)
    assert sorted(addresses) == [
        ("mlflow", "MLFLOW_DB_PASSWORD", "mlflow"),
        ("mlflow_users", "MLFLOW_USERS_DB_PASSWORD", "mlflow_users"),
        ("prefect", "PREFECT_DB_PASSWORD", "prefect"),
    ]
    mounted = [volume.split(":")[0] for content in services.values() for volume in content.get("volumes", [])]
    assert not [path for path in mounted if path.startswith("./") and not (DOCKER / path).is_file()]


def test_mlflows_keys_open_its_bucket_alone() -> None:
    policy = json.loads((DOCKER / "policy.json").read_text())
    assert {item["Effect"] for item in policy["Statement"]} == {"Allow"}
    assert {name for item in policy["Statement"] for name in item["Resource"]} == {
        "arn:aws:s3:::mlflow",
        "arn:aws:s3:::mlflow/*",
    }
    assert not [name for item in policy["Statement"] for name in item["Action"] if "*" in name or "Policy" in name]


@pytest.mark.parametrize(("again", "policy", "code"), [(False, "", 0), (True, "mlflow", 0), (True, "", 1)])
def test_the_bucket_gets_its_user_at_every_start_and_no_command_line_a_key(
    tmp_path: Path, again: bool, policy: str, code: int
) -> None:
    """bucket.sh with an ``mc`` that writes down how it was called; it refuses to attach a policy a second time."""
    script = tmp_path / "mc"
    script.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
case "$*" in
  *"user add"*) cat > {tmp_path}/stdin ;;
  *attach*) exit {int(again)} ;;
  *"user info"*) echo 'PolicyName: {policy}' ;;
esac
""")
    script.chmod(0o755)
    keys = {"MLFLOW_S3_ACCESS_KEY": "mlflow-user", "MLFLOW_S3_SECRET_KEY": "secret-of-mlflow"}
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **keys}
    assert subprocess.run(["sh", str(DOCKER / "bucket.sh")], env=env, check=False).returncode == code
    assert "secret-of-mlflow" not in (tmp_path / "calls").read_text()
    assert (tmp_path / "stdin").read_text() == "mlflow-user\nsecret-of-mlflow\n"


def test_each_database_of_compose_has_a_user_who_can_reach_no_other() -> None:
    names = ("prefect", "mlflow", "mlflow_users")
    passwords = {name: f"password-of-{name}" for name in names}
    variables = {f"{name.upper()}_DB_PASSWORD": password for name, password in passwords.items()}
    with postgres_server() as server:
        command = ["psql", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--dbname", server.url("postgres"), "--file"]
        subprocess.run([*command, str(DOCKER / "databases.sql")], env={**os.environ, **variables}, check=True)
        for user, other in product(names, (*names, "postgres", "template1")):
            address = f"postgresql://{user}:{passwords[user]}@127.0.0.1:{server.port}/{other}"
            if user == other:
                with psycopg.connect(address) as connection:
                    connection.execute("CREATE EXTENSION pg_trgm")  # Prefect's server makes it
                    connection.execute("CREATE TABLE things (name text)")
                    row = connection.execute("SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = %s", [user])
                    assert row.fetchone() == (False, False)
            else:
                with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                    psycopg.connect(address)


def test_what_the_files_set_is_what_the_code_reads() -> None:
    for file in (*DOCKER.iterdir(), *(DEPLOY / "k8s").glob("*.*"), *(DEPLOY / "vemlp").glob("*.*")):
        if file.is_file():
            assert rlflow_variables(file.read_text()) <= known_settings(), file


def test_the_dockerfile_lints_and_copies_what_is_there(tmp_path: Path) -> None:
    dockerfile = DOCKER / "Dockerfile"
    answer = tool("hadolint", str(dockerfile))
    assert answer.returncode == 0, answer.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(dockerfile.read_text().replace("WORKDIR /opt", "WORKDIR opt"))
    assert tool("hadolint", str(wrong)).returncode == 1
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in dockerfile.read_text().splitlines() if line.startswith("COPY ")]
    sources = [source for words in copied for source in words if not words[0].startswith("--from")]
    assert "infra/requirements/gpu.txt" in sources
    (build,) = re.findall(r"^RUN uv pip (\w+) .*--no-build .*/tmp/gpu.txt", dockerfile.read_text(), re.MULTILINE)
    assert build == "sync", "gpu.txt leaves pwinput out, which install would look for"
    assert not [source for source in sources if not (ROOT / source).exists() or source.split("/")[0] not in sent]
    assert not re.search(r"PASSWORD|TOKEN|SECRET", dockerfile.read_text())


def test_both_images_have_the_pinned_versions() -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "infra/requirements/gpu.txt").read_text(), re.MULTILINE))
    asked = (DOCKER / "servers.txt").read_text()
    for line in asked.splitlines():
        name, _, version = line.partition("==")
        if name and not name.startswith("#"):
            assert version or re.sub(r"\[.*", "", name) in pins, f"{line} has no version"
    values = k8s.KubernetesValues.model_validate(yaml.safe_load(k8s.VALUES.read_text()))
    assert values.ray_version == pins["ray"]


def test_the_gpu_environment_is_wheels_and_flash_attn_is_an_option() -> None:
    """A source package in gpu.txt fails in a fresh clone: flash-attn's build imports torch, and builds are isolated."""

    def commands(extra: str) -> str:
        words = ["make", "--dry-run", "--always-make", "--old-file=.uv/bin/uv", "install", f"EXTRA={extra}"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    requirements = ROOT / "infra" / "requirements"
    assert "flash-attn" not in (requirements / "gpu.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"flash-attn==[\w.]+\n", (requirements / "gpu-flash.txt").read_text())
    for extra in ("cpu", "gpu", "gpu-flash"):
        wheels, *_ = re.findall(r"pip sync .*", commands(extra))
        assert "--no-build " in wheels
        assert wheels.endswith(f"infra/requirements/{extra.removesuffix('-flash')}.txt")
    assert "gpu-flash.txt" not in commands("gpu")
    assert re.search(r"pip install .*--no-build-isolation .*gpu-flash.txt", commands("gpu-flash"))


def check_pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a cluster, valid by Kubernetes' schema."""
    pods = [group["template"] for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", []))]
    for pod in pods:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **pod}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    return pods


@pytest.mark.parametrize("where", ["rayjob", "raycluster"])
def test_kubernetes_objects_keep_to_their_schemas(where: str) -> None:
    found = documents(where, SHAPE, None)
    claim, *others = [item for item in found if item["apiVersion"] != "ray.io/v1"]
    rays = [item for item in found if item["apiVersion"] == "ray.io/v1"]
    for item in (claim, *others):
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    schema = json.loads((ROOT / "tests/contracts/kuberay.json").read_text())
    for ray in rays:
        jsonschema.validate(ray, schema)
    spec = rays[0]["spec"] if where == "raycluster" else rays[0]["spec"]["rayClusterSpec"]
    pods = check_pods(spec)
    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        variables = {item["name"]: item for item in container["env"]}
        assert all("secretKeyRef" in variables[name]["valueFrom"] for name in k8s.SECRETS)
        assert variables["RLFLOW_DATA_DIR"]["value"] in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert claim["metadata"]["name"] in json.dumps(pod["spec"]["volumes"])
        pod["spec"]["containers"][0]["imagee"] = "typo"
        with pytest.raises(kubernetes_validate.ValidationError):
            check_pods(spec)
    spec["headGroup"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(rays[0], schema)


def every_pod(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates of all objects, by what they belong to."""
    pods = {item["metadata"]["name"]: item["spec"]["template"] for item in found if "template" in item["spec"]}
    for item in found:
        cluster = item["spec"].get("rayClusterSpec", item["spec"])
        for group in (cluster.get("headGroupSpec"), *cluster.get("workerGroupSpecs", [])):
            if group is not None:
                pods[group.get("groupName", "head")] = group["template"]
    return pods


def test_no_pod_on_kubernetes_has_more_rights_than_it_needs() -> None:
    pods = every_pod(documents("raycluster", SHAPE, None))
    assert pods.keys() == {"rlflow-apply", "rlflow-worker-cpu", "head", "gpu"}
    for name, pod in pods.items():
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["automountServiceAccountToken"] is False, name
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), name
        # the policy is for pods with this label
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "rlflow"


def test_a_pod_with_flows_has_time_for_their_checkpoints_and_hands_them_the_signal() -> None:
    pods = every_pod(documents("raycluster", SHAPE, None))
    needed = Settings().stop_grace_seconds + AFTER_GRACE_SECONDS
    for name in ("head", "rlflow-worker-cpu"):
        assert pods[name]["spec"]["terminationGracePeriodSeconds"] > needed
    (head,) = pods["head"]["spec"]["containers"]
    assert head["lifecycle"]["preStop"]["exec"]["command"] == ["python", "-m", "infra.stack.worker", "stop"]
    (worker,) = pods["rlflow-worker-cpu"]["spec"]["containers"]
    assert worker["command"] == ["python", "-m", "infra.stack.worker", "cpu"]
    assert "livenessProbe" not in worker  # it would end the flows of a worker whose server is away
    services: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
    for name in ("worker", "worker-cpu"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > needed


def test_a_secret_store_makes_the_secret(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(k8s.VALUES.read_text().replace('secret_store: ""', "secret_store: vault"))
    assert "ExternalSecret" not in {item["kind"] for item in documents("rayjob", SHAPE, None)}
    (found,) = [item for item in documents("rayjob", SHAPE, values) if item["kind"] == "ExternalSecret"]
    assert found["spec"]["secretStoreRef"] == {"kind": "ClusterSecretStore", "name": "vault"}
    assert found["spec"]["target"]["name"] == "rlflow"


@pytest.mark.parametrize(("name", "workers"), [("grpo-geo3k", 0), ("grpo-geo3k-32b", 1), ("grpo-geo3k-72b", 3)])
def test_an_experiment_gets_the_nodes_that_it_takes(name: str, workers: int) -> None:
    *_, job = yaml.safe_load_all(cluster_files("rayjob", name, ["seed=3"], "mine", None))
    groups = job["spec"]["rayClusterSpec"].get("workerGroupSpecs", [])
    assert [group["replicas"] for group in groups] == [workers] * bool(workers)
    words = shlex.split(job["spec"]["entrypoint"])
    assert words == ["rlflow", "train", name, "--run-id", "mine", "--set", "seed=3"]


def test_a_task_file_for_vemlp_has_head_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (task,) = yaml.safe_load_all(cluster_files("vemlp", "grpo-geo3k-32b", (), "mine", None))
    assert {key: type(task[key]) for key in VEMLP_SAMPLE} == VEMLP_SAMPLE
    assert task["Framework"] in VEMLP_FRAMEWORKS
    assert all(role.keys() == VEMLP_ROLE for role in task["TaskRoleSpecs"])
    assert all({"Type", "MountPath"} <= storage.keys() for storage in task["Storages"])
    assert [(role["RoleName"], role["RoleReplicas"]) for role in task["TaskRoleSpecs"]] == [("head", 1), ("worker", 1)]
    assert task["RetryOptions"]["PolicySets"] == ["Failed", "InstanceReclaimed"]
    variables = {item["Name"]: item for item in task["Envs"]}
    assert variables["RAY_AUTH_TOKEN"] == {"Name": "RAY_AUTH_TOKEN", "Value": "a-secret", "IsPrivate": True}
    assert "HF_TOKEN" not in variables
    assert variables["RLFLOW_DATA_DIR"]["Value"] == task["Storages"][0]["MountPath"]


def test_what_vemlp_runs_starts_ray_by_role(tmp_path: Path) -> None:
    """The shell of the entry point, with a ``ray`` and an ``rlflow`` that only write down how they were called."""
    for name, more in (("ray", 'if [ "$1" = health-check ]; then exit 1; fi'), ("rlflow", "exit 3"), ("sleep", "")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/calls\n{more}\n')
        script.chmod(0o755)
    entrypoint = vemlp.entrypoint(SHAPE).replace("cd /opt/rlflow", f"cd {tmp_path}")

    def run(**variables: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
        code = subprocess.run(["sh", "-c", entrypoint], env=env, check=False).returncode
        return code, (tmp_path / "calls").read_text().splitlines()

    code, calls = run(MLP_ROLE="head")
    assert code == 3  # the platform retries by it
    assert calls == ["ray start --head --port=6379 --disable-usage-stats", "rlflow train grpo-test"]
    code, calls = run(MLP_ROLE="worker", MLP_HEAD_0_HOST="head-0")
    assert code == 0
    assert calls == [
        "ray start --address=head-0:6379 --disable-usage-stats",
        "ray health-check --address head-0:6379",
    ]


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(DeploymentError, match="RAY_AUTH_TOKEN is not set"):
        documents("vemlp", SHAPE, None)
    with pytest.raises(DeploymentError, match="takes 12 GPUs, and nodes of 8"):
        Shape("x", gpus=12, together=1, command=()).nodes(8)
    with pytest.raises(DeploymentError, match=r"sequence_parallel is 3, and a node has 8"):
        Shape("x", gpus=24, together=3, command=()).nodes(8)
    values = tmp_path / "values.yaml"
    values.write_text(k8s.VALUES.read_text() + "gpu_per_node: 4\n")
    with pytest.raises(DeploymentError, match=r"(?s)values.yaml cannot be used.*gpu_per_node"):
        documents("rayjob", SHAPE, values)


def test_a_shape_is_the_experiments() -> None:
    experiment = load_experiment("grpo-geo3k-32b", ["resources.rollout_workers=16", "training.sequence_parallel=4"])
    shape = shape_of(experiment, "run", [])
    assert (shape.gpus, shape.together, shape.nodes(8)) == (32, 4, 4)
