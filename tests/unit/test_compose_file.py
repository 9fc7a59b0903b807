"""The reader of compose files that tests/long/test_compose.py trusts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.compose_file import HealthCheck, Mount, NotUnderstoodError, fill_in, read_compose, read_image


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$$pool and ${USER}", "$pool and me"),
        ("${PORT:-5000}", "5000"),
        ("${USER:-you}", "me"),
        ("${USER:?set it}", "me"),
        ("${EMPTY:-given}", "given"),
        ("${NONE}", ""),
        ("x@${USER}/y", "x@me/y"),
    ],
)
def test_variables_are_filled_in(text: str, value: str) -> None:
    assert fill_in(text, {"USER": "me", "EMPTY": ""}) == value


@pytest.mark.parametrize("text", ["${NONE:?set it}", "${EMPTY:?set it}", "$USER", "${USER-you}", "${USER:+you}"])
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(NotUnderstoodError):
        fill_in(text, {"USER": "me", "EMPTY": ""})


def test_a_service_is_read_with_what_it_inherits(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("""
x-base: &base {image: worker, build: {target: worker}, restart: unless-stopped, init: true}
services:
  one:
    <<: *base
    command: [run, "1"]
    environment: {A: "${A}", B: plain}
    volumes: ["store:/state", "./a.sql:/a.sql:ro"]
    ports: ["127.0.0.1:${PORT:-5000}:80"]
    depends_on: {two: {condition: service_healthy}}
    stop_grace_period: 2m
  two:
    image: postgres:17
    healthcheck: {test: [CMD, ready], interval: 5s, timeout: 3s, retries: 20}
""")
    one, two = read_compose(file, {"A": "value"}).values()
    assert (one.image, one.target, one.command, one.restart, one.init) == (
        *("worker", "worker", ("run", "1")),
        *("unless-stopped", True),
    )
    assert one.environment == {"A": "value", "B": "plain"}
    assert one.mounts == (Mount("store", "/state", False), Mount("./a.sql", "/a.sql", True))
    assert [mount.is_volume for mount in one.mounts] == [True, False]
    assert one.ports == (("127.0.0.1", 5000, 80),)
    assert one.after == {"two": "service_healthy"}
    assert (one.stop_signal, one.stop_seconds) == ("SIGTERM", 120)
    assert two.health == HealthCheck(("ready",), 5, 3, 20, 0)
    assert (two.restart, two.command, two.target) == ("no", None, "")

    file.write_text(file.read_text() + "    network_mode: host\n")
    with pytest.raises(NotUnderstoodError, match="network_mode"):
        read_compose(file, {})


def test_a_stage_of_a_dockerfile_is_read(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("""FROM base AS first
ENV NOT=mine
FROM base AS second
RUN apt-get update \\
    && install --directory --owner rlflow /state
WORKDIR /opt/app
COPY a.txt b.txt ./
COPY flows flows
COPY --from=first /x /y
COPY run.sh /usr/local/bin/run
ENV PATH=/opt/bin:$PATH KEEP=1
USER 1000
CMD ["run", "--help"]
FROM base AS third
USER 7
""")
    image = read_image(file, "second")
    assert image.environment == {"PATH": "/opt/bin:$PATH", "KEEP": "1"}
    assert (image.user, image.folder, image.folders) == (1000, "/opt/app", ("/state",))
    assert image.copied == (
        ("a.txt", "/opt/app/a.txt"),
        ("b.txt", "/opt/app/b.txt"),
        ("flows", "/opt/app/flows"),
        ("run.sh", "/usr/local/bin/run"),
    )
    assert image.command == ("run", "--help")
    assert read_image(file, "third").user == 7
