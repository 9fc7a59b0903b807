"""The login of the Prefect and MLflow servers that rlflow starts, in a file that only its owner can read."""

from __future__ import annotations

import base64
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from infra.errors import ServerError
from infra.files import make_private
from infra.settings import Settings

_USER = "rlflow"


@dataclass(frozen=True, slots=True)
class Login:
    """One user and one password for both servers."""

    user: str
    password: str

    @property
    def text(self) -> str:
        """``user:password``, as the file holds it and as Prefect's page asks for it."""
        return f"{self.user}:{self.password}"

    @property
    def header(self) -> str:
        return header_of(self.text)

    def for_prefect(self) -> dict[str, str]:
        """Variables of Prefect's clients."""
        return {"PREFECT_API_AUTH_STRING": self.text}

    def for_mlflow(self) -> dict[str, str]:
        """Variables of MLflow's clients."""
        return {"MLFLOW_TRACKING_USERNAME": self.user, "MLFLOW_TRACKING_PASSWORD": self.password}

    def for_servers(self) -> dict[str, str]:
        """Variables of both servers. MLflow's application (``apps.py``) reads the same ones as its clients."""
        return {"PREFECT_SERVER_API_AUTH_STRING": self.text, **self.for_mlflow()}


def header_of(text: str) -> str:
    """Value of the HTTP header ``Authorization`` for ``user:password``."""
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def login_file(settings: Settings) -> Path:
    return settings.stack_dir / "login"


def how_to_log_in(settings: Settings) -> str:
    """Instructions for people who open the pages in a browser."""
    return f"user:password is in {login_file(settings)}: Prefect's page wants it as it stands, MLflow's in two fields"


def login_of(settings: Settings) -> Login:
    """The login of this data folder's servers. The first call makes it.

    Raises:
        ServerError: other users can read the file, or it does not hold a login.
    """
    path = login_file(settings)
    try:
        return _read(path)
    except FileNotFoundError:
        make_private(settings.data_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".login.{secrets.token_hex(8)}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{_USER}:{secrets.token_urlsafe(24)}\n")
    try:
        os.link(aside, path)  # fails if another process was faster; then its login is used
    except FileExistsError:
        pass
    finally:
        aside.unlink()
    return _read(path)


def _read(path: Path) -> Login:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        facts, text = os.fstat(file.fileno()), file.read()
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ServerError(
            f"{path} belongs to user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):o}. Allowed: this user "
            f"({os.getuid()}) and mode 600, for it holds a password. Remove it; the next start makes another."
        )
    match = re.fullmatch(r"([^:\s]+):(\S{16,})\n?", text)
    if match is None:
        raise ServerError(f"{path} does not hold user:password with 16 characters or more. Remove it and start again.")
    return Login(match[1], match[2])
