"""Settings of this machine: folders, servers, the trainer's interpreter. An experiment never depends on them.

Each field is read from the environment variable ``RLFLOW_<FIELD>``. By default everything is in one data folder, in
SQLite and local files, without a server or an account. docs/howto/stores.md: PostgreSQL and S3.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

TrackerName = Literal["tensorboard", "wandb", "swanlab"]
MetricNames = Literal["easyr1", "verl"]


class _Folder:
    """A folder below ``data_dir``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, settings: Settings, owner: type[Settings]) -> Path:
        return settings.data_dir / self._name


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="RLFLOW_", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    data_dir: Path = Field(default=Path("data"), validate_default=True)
    """rlflow writes everything below this folder."""
    mlflow_uri: str = ""
    """Address of the MLflow tracking and registry server. Empty: SQLite under the data folder."""
    trainer_python: Path = Path(sys.executable)
    """Python interpreter of the processes that import torch. It may belong to another environment."""
    ray_address: str = ""
    """A running Ray cluster that includes this machine: host:port of its head, or auto. Empty: each trainer starts
    and stops a local Ray."""
    stop_grace_seconds: float = Field(25.0, gt=0)
    """How long a trainer may take to commit its checkpoint after a request to stop, before it is killed. Prefect kills
    the process of a cancelled flow after 30 seconds."""
    driver_deadline_seconds: float = Field(120.0, gt=0)
    """A trainer that gets no heartbeat from its flow for this long commits a checkpoint and stops."""
    server_timeout_seconds: float = Field(5.0, gt=0)
    """How long preflight waits for an MLflow or Prefect server to answer."""
    tracking_wait_seconds: float = Field(600.0, ge=0)
    """How long the end of a run waits for an unreachable MLflow server before the step fails and is retried."""
    system_metrics_seconds: float = Field(30.0, ge=0)
    """Seconds between two points of this machine's load (CPU, memory, disk, network, GPUs), which go to MLflow while a
    run is open. 0: none."""
    trackers: Annotated[tuple[TrackerName, ...], NoDecode] = ()
    """Trackers in addition to MLflow, separated by commas: tensorboard, wandb, swanlab. docs/trackers.md."""
    tracker_python: Path = Path(sys.executable)
    """Python interpreter with the packages of the trackers, which may conflict with those of rlflow."""
    metric_names: Annotated[tuple[MetricNames, ...], NoDecode] = ()
    """Trainers whose names of metrics MLflow and the trackers get as well, separated by commas: easyr1, verl.
    docs/from-easyr1-and-verl.md."""
    traces: int = Field(4, ge=0)
    """Rollouts of each segment's last batch that MLflow gets as traces, with their pictures. 0: none."""
    prefect_database: SecretStr = SecretStr("")
    """PostgreSQL database of the Prefect server that rlflow starts: postgresql://user:password@host/database. Empty:
    SQLite under the data folder."""
    mlflow_database: SecretStr = SecretStr("")
    """The same for the MLflow server that rlflow starts."""
    store: str = ""
    """s3://bucket/prefix, for copies of checkpoints, datasets, evaluations, merged models and results, and for MLflow's
    artifacts. Address and keys of the endpoint come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    Empty: everything is in the data folder only."""
    store_wait_seconds: float = Field(3600.0, ge=0)
    """How long the end of a run waits for its last checkpoint to reach the store before it fails."""
    downloads_gib: float = Field(200.0, gt=0)
    """Space for downloaded datasets in the data folder. When it is exceeded, the least recently used ones are deleted,
    except those used within a day."""
    max_gib: float = Field(0.0, ge=0)
    """Quota of the data folder in GiB. Preflight refuses a run that does not fit into it, and clean removes what nobody
    needs only as far as the quota requires. 0: no quota, and clean removes everything that nobody needs."""
    clean_free_share: float = Field(0.1, ge=0, lt=1)
    """Share of the quota that clean leaves free, for the next runs."""
    clean_days: int = Field(30, ge=1)
    """Clean leaves alone what was made or used within so many days."""
    host: str = "127.0.0.1"
    """Address that the local stack's servers listen on. Their login crosses the network as plain text: use another
    address than loopback only inside a network that you trust, or behind a proxy with TLS."""
    allowed_hosts: str = ""
    """Host names, separated by commas, under which browsers may open the servers, besides localhost and ``host``. Other
    names are refused, so that no foreign page reaches the servers through your browser."""
    prefect_port: int = Field(4200, ge=1, le=65535)
    """Port of the local stack's Prefect server."""
    mlflow_port: int = Field(5000, ge=1, le=65535)
    """Port of the local stack's MLflow server."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the local stack's Prometheus endpoint, such as 9464. 0: the stack has none. docs/howto/operate.md."""
    gpu_slots: int = Field(1, ge=1)
    """Runs that may use GPUs of the local stack at the same time. Each claims as many GPUs as it has workers, and waits
    until so many are free. Set it to the number of GPUs of a machine whose runs shall share them."""
    share_gpus: bool = False
    """Start at once, even if other runs or evaluations of this machine use the GPUs. They must fit next to each other.
    """
    retry_delay_scale: float = Field(1.0, ge=0)
    """Factor on the delays of docs/reliability.md. 0: every retry starts at once."""

    datasets_dir: ClassVar = _Folder("datasets")
    duplicates_dir: ClassVar = _Folder("duplicates")
    models_dir: ClassVar = _Folder("models")
    runs_dir: ClassVar = _Folder("runs")
    # Notes about flow runs that an outage ended before they could open their run.
    unopened_dir: ClassVar = _Folder("unopened")
    ablations_dir: ClassVar = _Folder("ablations")
    evaluations_dir: ClassVar = _Folder("evaluations")
    downloads_dir: ClassVar = _Folder("downloads")
    jobs_dir: ClassVar = _Folder("jobs")
    prefect_home: ClassVar = _Folder("prefect")
    mlflow_dir: ClassVar = _Folder("mlflow")
    trackers_dir: ClassVar = _Folder("trackers")  # event files and offline runs of the other trackers
    stack_dir: ClassVar = _Folder("stack")

    @field_validator("data_dir", "tracker_python")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("trackers", "metric_names", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("ray_address")
    @classmethod
    def _of_a_node(cls, value: str) -> str:
        _, colon, port = value.rpartition(":")
        if value in ("", "auto") or ("://" not in value and colon and port.isdigit()):
            return value
        raise ValueError(
            f"RLFLOW_RAY_ADDRESS is {value!r}. Allowed are host:port of the cluster's head (6379 by default) and "
            "auto, on a machine that is a node of the cluster; Ray's client (ray://) is not."
        )

    @field_validator("prefect_database", "mlflow_database")
    @classmethod
    def _postgresql(cls, value: SecretStr) -> SecretStr:
        # The text is a secret: no error may show it. Each server adds its own driver.
        if value.get_secret_value() and not value.get_secret_value().startswith("postgresql://"):
            raise ValueError("not a PostgreSQL address. Allowed: postgresql://user:password@host:port/database.")
        return value

    @field_validator("store")
    @classmethod
    def _bucket(cls, value: str) -> str:
        if value and not re.fullmatch(r"s3://[^/@:\s]+(/[^@\s]*)?", value):
            raise ValueError(
                "not a place in an S3 bucket. Allowed: s3://bucket/prefix; keys are AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, never part of the address."
            )
        return value.rstrip("/")

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_uri or self.database_uri

    @property
    def database_uri(self) -> str:
        """MLflow's database as a SQLAlchemy address, with the password."""
        address = self.mlflow_database.get_secret_value()
        if address:
            return address.replace("postgresql://", "postgresql+psycopg://", 1)
        return f"sqlite:///{self.mlflow_dir / 'mlflow.db'}"

    @property
    def artifacts_uri(self) -> str:
        """Where MLflow's artifacts are, unless an MLflow server that rlflow did not start decides that."""
        return f"{self.store}/mlflow" if self.store else (self.mlflow_dir / "artifacts").as_uri()

    @property
    def names(self) -> list[str]:
        """Host names under which browsers may open the servers."""
        given = [name.strip() for name in self.allowed_hosts.split(",") if name.strip()]
        return list(dict.fromkeys(["localhost", "127.0.0.1", self.host, *given]))
