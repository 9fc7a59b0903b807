"""A custom task of Volcano Engine's machine learning platform (veMLP): what ``volc ml_task submit --conf`` takes.

One head and workers of the same flavor; on each of them the platform runs ``Entrypoint`` and sets MLP_ROLE and the
addresses of all roles (MLP_HEAD_0_HOST). The head starts Ray and runs the flow, the others join it until it is gone. A
retry of the platform is a new set of nodes on the same storage, where the run goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.deploy import Shape
from infra.errors import DeploymentError

VALUES = Path(__file__).with_name("values.yaml")
_PORT = 6379
_SECONDS_PER_DAY = 86400
_TOKEN = "RAY_AUTH_TOKEN"


class Storage(BaseModel):
    """One mount; which of the names a type needs is the platform's to say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    Type: Literal["Vepfs", "Tos", "Nas", "Cfs"]
    MountPath: str
    SubPath: str | None = None
    FsName: str | None = None
    VepfsId: str | None = None
    Bucket: str | None = None
    Prefix: str | None = None
    NasId: str | None = None
    NasAddr: str | None = None
    ReadOnly: bool | None = None


class VemlpValues(BaseModel):
    """infra/deploy/vemlp/values.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    image: str
    """What infra/deploy/docker/Dockerfile makes of its target worker, in a registry that the platform pulls from."""
    queue: str
    """ResourceQueueID, as the console shows it."""
    flavor: str
    """Of every node."""
    gpus_per_node: int = Field(ge=1)
    """That the flavor has."""
    storages: tuple[Storage, ...] = Field(min_length=1)
    """The first one holds RLFLOW_DATA_DIR: a file system that all nodes write."""
    environment: dict[str, str]
    private_environment: tuple[str, ...]
    """Variables of this shell that are secrets: those that are set go along, hidden from all but who submits."""
    priority: Literal[2, 4, 6]
    preemptible: bool
    """Idle resources, which the platform takes back when it likes; the task is then tried again."""
    max_days: float = Field(gt=0)
    retries: int = Field(ge=0)


def custom_task(values: VemlpValues, shape: Shape, secrets: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The task file, as data that YAML can hold. It has secrets in it: keep it out of git.

    Args:
        secrets: where the values of ``private_environment`` are found.

    Raises:
        DeploymentError: RAY_AUTH_TOKEN is not set, without which anybody in the network could run code on the nodes.
    """
    if not secrets.get(_TOKEN):
        raise DeploymentError(
            f"{_TOKEN} is not set: the nodes of the task know each other by it. Set it to a secret: export "
            f"{_TOKEN}=$(openssl rand -hex 32)"
        )
    nodes = shape.nodes(values.gpus_per_node)
    roles = [{"RoleName": "head", "RoleReplicas": 1, "Flavor": values.flavor}]
    if nodes > 1:
        roles.append({"RoleName": "worker", "RoleReplicas": nodes - 1, "Flavor": values.flavor})
    plain = {
        "RLFLOW_DATA_DIR": values.storages[0].MountPath,
        "RLFLOW_RAY_ADDRESS": "auto",
        "RAY_AUTH_MODE": "token",
        **values.environment,
    }
    private = {name: secrets[name] for name in (*values.private_environment, _TOKEN) if secrets.get(name)}
    return {
        "TaskName": shape.name,
        "Description": f"rlflow {shape.name}: {shape.gpus} GPUs on {nodes} node(s)",
        "Tags": ["rlflow"],
        "Framework": "Custom",
        "ImageUrl": values.image,
        "ResourceQueueID": values.queue,
        "TaskRoleSpecs": roles,
        "Entrypoint": entrypoint(shape),
        "Envs": [
            *({"Name": name, "Value": value} for name, value in plain.items()),
            *({"Name": name, "Value": value, "IsPrivate": True} for name, value in private.items()),
        ],
        "Storages": [storage.model_dump(exclude_none=True) for storage in values.storages],
        "ActiveDeadlineSeconds": int(values.max_days * _SECONDS_PER_DAY),
        "Priority": values.priority,
        "Preemptible": values.preemptible,
        "AccessType": "Private",
        "RetryOptions": {
            "EnableRetry": values.retries > 0,
            "MaxRetryTimes": values.retries,
            "IntervalSeconds": 120,
            "PolicySets": ["Failed", "InstanceReclaimed"],
        },
    }


def entrypoint(shape: Shape) -> str:
    """What each node runs. The head's run waits for the others' GPUs by itself (``resources.wait_minutes``). They wait
    for the head's port, and end well when the head has ended: a failure of theirs would make the platform repeat a run
    that is done."""
    return f"""set -eu
cd /opt/rlflow
if [ "${{MLP_ROLE:-head}}" = head ]; then
  ray start --head --port={_PORT} --disable-usage-stats
  exec {shlex.join(shape.command)}
fi
until ray start --address="$MLP_HEAD_0_HOST:{_PORT}" --disable-usage-stats; do sleep 5; done
while ray health-check --address "$MLP_HEAD_0_HOST:{_PORT}" >/dev/null 2>&1; do sleep 30; done
"""
