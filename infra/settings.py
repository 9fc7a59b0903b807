"""Settings: the facts of this machine (folders, servers, the trainer's interpreter), never of an experiment.

Each field is read from the environment variable ``RLFLOW_<FIELD>``. Without any, everything is embedded:
SQLite and local files under one data folder, no server, no account.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="RLFLOW_", frozen=True, use_attribute_docstrings=True)

    data_dir: Path = Field(default=Path("data"), validate_default=True)
    """Everything that rlflow writes lies below this folder."""
    mlflow_uri: str = ""
    """Tracking and registry server. Empty: SQLite under the data folder."""
    trainer_python: Path = Path(sys.executable)
    """Interpreter of everything that imports torch. On GPUs it may be that of another environment."""
    ray_address: str = ""
    """A running Ray cluster. Empty: the trainer starts a Ray of its own and takes it down again."""
    stop_grace_seconds: float = Field(25.0, gt=0)
    """How long a trainer that is asked to stop may take to commit its checkpoint before it is killed. Prefect itself
    kills a cancelled flow's process after 30 seconds."""
    server_timeout_seconds: float = Field(5.0, gt=0)
    """How long preflight waits for an MLflow or Prefect server to answer."""
    tracking_wait_seconds: float = Field(600.0, ge=0)
    """How long the end of a run waits for an MLflow that is away before it fails (and is tried again)."""
    retry_delay_scale: float = Field(1.0, ge=0)
    """Times the delays of docs/reliability.md. 0: every retry starts at once."""

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def datasets_dir(self) -> Path:
        return self.data_dir / "datasets"

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def evaluations_dir(self) -> Path:
        return self.data_dir / "evaluations"

    @property
    def downloads_dir(self) -> Path:
        return self.data_dir / "downloads"

    @property
    def jobs_dir(self) -> Path:
        return self.data_dir / "jobs"

    @property
    def prefect_home(self) -> Path:
        return self.data_dir / "prefect"

    @property
    def mlflow_dir(self) -> Path:
        return self.data_dir / "mlflow"

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_uri or f"sqlite:///{self.mlflow_dir / 'mlflow.db'}"

    @property
    def artifacts_dir(self) -> Path | None:
        """Where MLflow's artifacts lie; None where an MLflow server decides that itself."""
        return None if self.mlflow_uri else self.mlflow_dir / "artifacts"
