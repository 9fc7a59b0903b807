"""Kubernetes objects for KubeRay (ray.io/v1, KubeRay 1.5.1 or newer) and what goes with a cluster, as data for YAML.

The head of a RayCluster is a GPU node, because the flow runs there and merging verifies the model on a GPU. A retry of
a RayJob is a new cluster on the same volume, where the run continues from its last checkpoint.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from infra.deploy import Shape

VALUES = Path(__file__).with_name("values.yaml")
DATA_DIR = "/data"
_HEAD = "127.0.0.1:6379"  # of the node that the flow runs on
_LABELS = {"app.kubernetes.io/part-of": "rlflow"}
_WORKER = ("python", "-m", "infra.stack.worker")
# RLFLOW_STOP_GRACE_SECONDS for a checkpoint, 30 s for the flow, and time to stop the worker.
_STOP_SECONDS = 90
# For readiness alone: it says whether Prefect's server answers, and an outage of the server must not end a flow.
_WORKS = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8085/health', timeout=5)"
# Keys of the secret and variables of the same name; kubectl create secret generic, docs/howto/cluster.md.
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING", "HF_TOKEN")

Manifest = dict[str, Any]  # one object of Kubernetes, as its API takes it
_DATA: Manifest = {"name": "data", "persistentVolumeClaim": {"claimName": "rlflow-data"}}


class KubernetesValues(BaseModel):
    """infra/deploy/k8s/values.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: str
    image: str
    """What infra/deploy/docker/Dockerfile makes of its target worker, in a registry that the nodes pull from."""
    ray_version: str
    """Of the image: infra/requirements/gpu.txt."""
    gpus_per_node: int = Field(ge=1)
    cpus_per_node: str
    """A Kubernetes quantity, as is memory."""
    memory_per_node: str
    shared_memory: str
    """/dev/shm of each node, a part of its memory: NCCL and Ray's object store."""
    node_selector: dict[str, str]
    gpu_tolerations: bool
    """Tolerate the taint nvidia.com/gpu, which GPU nodes often carry."""
    storage_class: str
    """Of a file system that many nodes write at once (ReadWriteMany). Empty: the cluster's default class."""
    storage_size: str
    worker_cpus: str
    """Of the worker for the pool cpu, which recovers runs and prepares data."""
    worker_memory: str
    gpu_slots: int = Field(ge=1)
    """Runs that the pool gpu takes at a time. Others wait, evaluations too, so none lands on GPUs that train."""
    secret_store: str
    """A ClusterSecretStore, from which the External Secrets Operator makes the Secret. Empty: kubectl has made it."""
    secret_key: str
    """Where the keys are in that store."""
    secret: str
    """Name of the Secret with the keys of ``SECRETS``; those that it lacks are left out."""
    environment: dict[str, str]
    """Addresses of the servers, and whatever else is no secret."""
    retries: int = Field(ge=0)
    """Of a RayJob, each with a new cluster; the trainer's own retries come before."""


def volume_claim(values: KubernetesValues) -> Manifest:
    """The data folder of all runs, on every node."""
    spec: Manifest = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": values.storage_size}}}
    if values.storage_class:
        spec["storageClassName"] = values.storage_class
    return _object(values, "v1", "PersistentVolumeClaim", "rlflow-data", spec)


def network_policy(values: KubernetesValues) -> Manifest:
    """Only pods of the namespace and KubeRay's operator reach the nodes of a cluster. The way out is open."""
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    spec = {
        "podSelector": {"matchLabels": _LABELS},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}, {"namespaceSelector": {}, "podSelector": operator}]}],
    }
    return _object(values, "networking.k8s.io/v1", "NetworkPolicy", "rlflow", spec)


def external_secret(values: KubernetesValues) -> Manifest:
    """The Secret, kept by the External Secrets Operator."""
    spec = {
        "refreshInterval": "1h",
        "secretStoreRef": {"kind": "ClusterSecretStore", "name": values.secret_store},
        "target": {"name": values.secret},
        "dataFrom": [{"extract": {"key": values.secret_key}}],
    }
    return _object(values, "external-secrets.io/v1", "ExternalSecret", values.secret, spec)


def apply_job(values: KubernetesValues) -> Manifest:
    """Makes Prefect's work pools and applies all deployments."""
    container = _container(values, "apply", {"cpu": "1", "memory": "2Gi"})
    container |= {"command": ["/bin/sh", "infra/deploy/docker/apply.sh"]}
    template = _template({"restartPolicy": "OnFailure", "containers": [container]})
    spec = {"backoffLimit": 6, "ttlSecondsAfterFinished": 600, "template": template}
    return _object(values, "batch/v1", "Job", "rlflow-apply", spec)


def light_worker(values: KubernetesValues) -> Manifest:
    """A Prefect worker for the pool cpu: recovery, ablations, the preparation of data, cleaning."""
    container = _container(values, "worker", {"cpu": values.worker_cpus, "memory": values.worker_memory})
    container |= {
        "command": [*_WORKER, "cpu"],
        "readinessProbe": {
            "exec": {"command": ["python", "-c", _WORKS]},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
        "volumeMounts": [{"name": "data", "mountPath": DATA_DIR}],
    }
    template = _template(
        {"terminationGracePeriodSeconds": _STOP_SECONDS, "containers": [container], "volumes": [_DATA]}
    )
    name = "rlflow-worker-cpu"
    template["metadata"]["labels"]["app.kubernetes.io/name"] = name
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
        "template": template,
    }
    return _object(values, "apps/v1", "Deployment", name, spec)


def ray_cluster(values: KubernetesValues, shape: Shape) -> Manifest:
    """A permanent cluster, on which a Prefect worker starts runs."""
    return _object(values, "ray.io/v1", "RayCluster", shape.name, _cluster_spec(values, shape))


def ray_job(values: KubernetesValues, shape: Shape) -> Manifest:
    """One run with its own cluster, which is removed when the run ends."""
    spec = {
        "entrypoint": shlex.join(shape.command),
        "submissionMode": "K8sJobMode",
        "backoffLimit": values.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,  # time to read the logs of its nodes
        "rayClusterSpec": _cluster_spec(values, shape),
    }
    return _object(values, "ray.io/v1", "RayJob", shape.name, spec)


def prefect_worker(values: KubernetesValues, shape: Shape) -> Manifest:
    """A Prefect worker on the head of ``ray_cluster``: ``prefect deployment run`` starts runs there."""
    spec = {
        "entrypoint": shlex.join([*_WORKER, "gpu"]),
        "submissionMode": "K8sJobMode",
        "clusterSelector": {"ray.io/cluster": shape.name},
    }
    return _object(values, "ray.io/v1", "RayJob", f"{shape.name}-worker", spec)


def _object(values: KubernetesValues, version: str, kind: str, name: str, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": values.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _cluster_spec(values: KubernetesValues, shape: Shape) -> Manifest:
    nodes, gpus = shape.nodes(values.gpus_per_node), min(shape.gpus, values.gpus_per_node)
    spec: Manifest = {
        "rayVersion": values.ray_version,
        "authOptions": {"mode": "token"},  # otherwise anybody who reaches a node can run code on it
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "template": _pod(values, "head", gpus),
        },
    }
    if nodes > 1:
        spec["workerGroupSpecs"] = [
            {
                "groupName": "gpu",
                "replicas": nodes - 1,
                "minReplicas": nodes - 1,
                "maxReplicas": nodes - 1,
                "rayStartParams": {},
                "template": _pod(values, "worker", gpus),
            }
        ]
    return spec


def _container(values: KubernetesValues, name: str, resources: Manifest) -> Manifest:
    variables = {"RLFLOW_DATA_DIR": DATA_DIR, "RLFLOW_GPU_SLOTS": str(values.gpu_slots), **values.environment}
    environment: list[Manifest] = [{"name": name, "value": value} for name, value in variables.items()]
    for secret in SECRETS:
        reference = {"name": values.secret, "key": secret, "optional": True}  # a server may need no password
        environment.append({"name": secret, "valueFrom": {"secretKeyRef": reference}})
    return {
        "name": name,
        "image": values.image,
        "env": environment,
        # equal, or the kernel may reclaim memory during a step
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _template(spec: Manifest) -> Manifest:
    """Of a pod of user 1000, as the image has it, which cannot ask Kubernetes for anything."""
    user = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    context = {"securityContext": user, "automountServiceAccountToken": False}
    return {"metadata": {"labels": dict(_LABELS)}, "spec": {**context, **spec}}


def _pod(values: KubernetesValues, role: str, gpus: int) -> Manifest:
    """A node of a Ray cluster. KubeRay adds its probes."""
    resources = {"cpu": values.cpus_per_node, "memory": values.memory_per_node, "nvidia.com/gpu": str(gpus)}
    container = _container(values, f"ray-{role}", resources)
    container["env"].insert(0, {"name": "RLFLOW_RAY_ADDRESS", "value": _HEAD})
    container["volumeMounts"] = [
        {"name": "data", "mountPath": DATA_DIR},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    spec: Manifest = {
        "containers": [container],
        "volumes": [
            _DATA,
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": values.shared_memory}},
        ],
    }
    if role == "head":  # the flow runs there, and Ray does not hand on the signal that ends the pod
        container["lifecycle"] = {"preStop": {"exec": {"command": [*_WORKER, "stop"]}}}
        spec["terminationGracePeriodSeconds"] = _STOP_SECONDS
    if values.node_selector:
        spec["nodeSelector"] = values.node_selector
    if values.gpu_tolerations:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return _template(spec)
