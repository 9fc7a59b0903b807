"""Reads a compose file and a Dockerfile as docker does, as far as those of infra/deploy/docker go; refuses the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_READ = {
    "image", "build", "command", "entrypoint", "environment", "volumes", "ports", "depends_on", "healthcheck",
    "restart", "init", "stop_signal", "stop_grace_period", "shm_size", "deploy",
}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\})")
_STAGE = re.compile(r"FROM (?P<base>\S+) AS (?P<name>\S+)")


class NotUnderstoodError(Exception):
    """Something that this reader would otherwise pass over in silence."""


@dataclass(frozen=True, slots=True)
class Mount:
    source: str  # a path, or the name of a volume
    target: str
    read_only: bool

    @property
    def is_volume(self) -> bool:
        return "/" not in self.source


@dataclass(frozen=True, slots=True)
class HealthCheck:
    command: tuple[str, ...]
    interval: float
    timeout: float
    retries: int
    start_period: float


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    image: str
    target: str  # of the Dockerfile; empty: the image is somebody else's
    entrypoint: tuple[str, ...] | None  # None: the image's
    command: tuple[str, ...] | None
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[tuple[str, int, int], ...]  # address and port of this machine, port of the service
    after: Mapping[str, str]  # services, and what has to be true of each
    health: HealthCheck | None
    restart: str
    init: bool
    stop_signal: str
    stop_seconds: float
    shared_memory: str


@dataclass(frozen=True, slots=True)
class Image:
    """What a stage of the Dockerfile says about what is started in it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    user: int = 0
    folder: str = "/"
    copied: tuple[tuple[str, str], ...] = ()  # from the repository, to the image
    folders: tuple[str, ...] = ()  # made for the user
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def read_variables(path: Path) -> dict[str, str]:
    """A file of NAME=value lines, as compose reads ``.env``."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Compose's interpolation: ${NAME}, ${NAME:-default}, ${NAME:?error} and $$.

    Raises:
        NotUnderstoodError: a variable that must be set is not, or something else begins with $.
    """

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        given = variables.get(found["name"], "")
        if not given and found["kind"] == ":?":
            raise NotUnderstoodError(f"{found['name']}: {found['rest']}")
        return given or (found["rest"] if found["kind"] == ":-" else "")

    if "$" in _VARIABLE.sub("", text):
        raise NotUnderstoodError(f"{text!r} holds a $ that is neither $$ nor ${{NAME}}")
    return _VARIABLE.sub(value, text)


def read_compose(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    content = yaml.safe_load(path.read_text())
    return {name: _service(name, _filled(found, variables)) for name, found in content["services"].items()}


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    match value:
        case str():
            return fill_in(value, variables)
        case dict():
            return {name: _filled(item, variables) for name, item in value.items()}
        case list():
            return [_filled(item, variables) for item in value]
    return value


def _service(name: str, found: dict[str, Any]) -> Service:
    if unknown := found.keys() - _READ:
        raise NotUnderstoodError(f"{name}: {sorted(unknown)}")
    after = found.get("depends_on", {})
    return Service(
        name=name,
        image=found["image"],
        target=found.get("build", {}).get("target", ""),
        entrypoint=_words(found.get("entrypoint")),
        command=_words(found.get("command")),
        environment=found.get("environment", {}),
        mounts=tuple(map(_mount, found.get("volumes", []))),
        ports=tuple(map(_port, found.get("ports", []))),
        after={other: wanted["condition"] for other, wanted in after.items()},
        health=_health(found["healthcheck"]) if "healthcheck" in found else None,
        restart=found.get("restart", "no"),
        init=found.get("init", False),
        stop_signal=found.get("stop_signal", "SIGTERM"),
        stop_seconds=_seconds(found.get("stop_grace_period", "10s")),
        shared_memory=found.get("shm_size", "64mb"),
    )


def _words(found: Any) -> tuple[str, ...] | None:
    if found is None or isinstance(found, list):
        return None if found is None else tuple(map(str, found))
    raise NotUnderstoodError(f"{found!r}: a command is a list")


def _mount(text: str) -> Mount:
    source, target, *mode = text.split(":")
    if mode not in ([], ["ro"]):
        raise NotUnderstoodError(f"the volume {text!r}")
    return Mount(source, target, bool(mode))


def _port(text: str) -> tuple[str, int, int]:
    address, published, inside = text.split(":")
    return address, int(published), int(inside)


def _health(found: dict[str, Any]) -> HealthCheck:
    kind, *command = found["test"]
    if kind != "CMD":
        raise NotUnderstoodError(f"the health check {found['test']!r}")
    times = [_seconds(found.get(name, "0s")) for name in ("interval", "timeout", "start_period")]
    return HealthCheck(tuple(command), times[0], times[1], int(found["retries"]), times[2])


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1]
    return float(number) * {"s": 1, "m": 60}[unit]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a Dockerfile, as it is written."""

    base: str
    steps: tuple[tuple[str, str], ...]  # instruction, rest of its line


def read_stages(dockerfile: Path) -> dict[str, Stage]:
    """All stages, by name. What stands before the first one is left out."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    starts = [number for number, line in enumerate(lines) if _STAGE.match(line)]
    stages = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        found = _STAGE.match(lines[start])
        assert found is not None
        steps = [line.split(maxsplit=1) for line in lines[start + 1 : end]]
        stages[found["name"]] = Stage(found["base"], tuple((word, rest) for word, rest in steps))
    return stages


def read_image(dockerfile: Path, stage: str) -> Image:
    """The last word of each instruction of a stage; what its base image says is not known here."""
    environment: dict[str, str] = {}
    copied: list[tuple[str, str]] = []
    folders: list[str] = []
    user, folder, command = 0, "/", ()
    for word, rest in read_stages(dockerfile)[stage].steps:
        match word:
            case "ENV":
                environment |= dict(item.split("=", 1) for item in shlex.split(rest))
            case "USER":
                user = int(rest)
            case "WORKDIR":
                folder = rest
            case "COPY" if not rest.startswith("--from"):
                *sources, target = rest.split()
                copied += [(source, place(folder, source, target)) for source in sources]
            case "RUN":
                folders += re.findall(r"install --directory --owner rlflow (\S+)", rest)
            case "CMD":
                command = tuple(yaml.safe_load(rest))
    return Image(environment, user, folder, tuple(copied), tuple(folders), (), command)


def place(folder: str, source: str, target: str) -> str:
    """Where COPY puts ``source``. A folder's content goes to ``target`` itself."""
    base = target if target.startswith("/") else f"{folder}/{target.removeprefix('./')}"
    return f"{base.rstrip('/')}/{Path(source).name}" if target.endswith("/") else base
