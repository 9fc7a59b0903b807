"""What other tests build on: ports that are theirs alone, and one at which nobody answers."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests import ports


def test_a_reserved_port_can_be_listened_at_and_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ports.reserved_port()
    socket.create_server(("127.0.0.1", mine)).close()
    monkeypatch.setattr(ports, "_PORTS", range(mine, mine + 1))
    with pytest.raises(OSError, match="none of the ports"):
        ports.reserved_port()
    code = f"from tests import ports; ports._PORTS = range({mine}, {mine + 1}); ports.reserved_port()"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "none of the ports" in other.stderr


def test_a_port_with_a_server_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match="none of the ports"):
            ports.reserved_port()


def test_a_refusing_port_refuses_and_stays_taken(refusing_port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", refusing_port), timeout=5)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", refusing_port))
