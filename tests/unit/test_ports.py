"""Free ports of servers and ranks. And what other tests build on: ports that are theirs alone, and one at which nobody
answers."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from infra.stack import servers
from rlcore import process
from rlcore.process import free_ports
from tests import ports


@pytest.mark.parametrize("module", [process, servers])
def test_a_free_port_is_one_that_no_connection_gets(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and the start of its server, other programs open connections."""
    port = module.free_port()
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= port < first_of_connections
    monkeypatch.setattr(module, "_PORTS", range(port, port + 1))
    assert module.free_port() == port
    with socket.create_server(("127.0.0.1", port)), pytest.raises(OSError, match=rf"the ports {port} to {port}"):
        module.free_port()


def test_ranks_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    assert first != second
    monkeypatch.setattr(process, "_PORTS", range(first, first + 1))
    with pytest.raises(OSError, match=f"^1 of the ports {first} to {first} are free, and 2 are needed$"):
        free_ports(2)


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
