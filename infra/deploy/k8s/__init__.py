"""Kubernetes objects for KubeRay (ray.io/v1, KubeRay 1.5.1 or newer) and a volume, as data for YAML.

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
# Keys of the secret and variables of the same name; kubectl create secret generic, docs/howto/cluster.md.
SECRETS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING", "HF_TOKEN")

Manifest = dict[str, Any]  # one object of Kubernetes, as its API takes it


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
        "entrypoint": "prefect worker start --pool gpu --type process",
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


def _pod(values: KubernetesValues, role: str, gpus: int) -> Manifest:
    resources = {"cpu": values.cpus_per_node, "memory": values.memory_per_node, "nvidia.com/gpu": str(gpus)}
    variables = {"RLFLOW_DATA_DIR": DATA_DIR, "RLFLOW_RAY_ADDRESS": _HEAD, **values.environment}
    environment: list[Manifest] = [{"name": name, "value": value} for name, value in variables.items()]
    for name in SECRETS:
        reference = {"name": values.secret, "key": name, "optional": True}  # a server may need no password
        environment.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    spec: Manifest = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": f"ray-{role}",
                "image": values.image,
                "env": environment,
                # equal, or the kernel may reclaim memory during a step
                "resources": {"requests": resources, "limits": resources},
                "volumeMounts": [
                    {"name": "data", "mountPath": DATA_DIR},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "rlflow-data"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": values.shared_memory}},
        ],
    }
    if values.node_selector:
        spec["nodeSelector"] = values.node_selector
    if values.gpu_tolerations:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"spec": spec}
