"""Prefect's server goes on when an automation is written while the server reads all automations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from infra import environment
from infra.settings import Settings
from tests.shell import ROOT

# The server's own task holds the lock until the automation is committed, as a slow periodic read does.
WRITE = """
import asyncio
import httpx
from infra.stack import apps
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers

async def read_slowly(seconds):
    async with triggers._automations_lock():
        await asyncio.sleep(seconds)

async def main():
    await provide_database_interface().create_db()
    transport = httpx.ASGITransport(app=apps.prefect())
    document = {
        "name": "one", "actions": [{"type": "do-nothing"}],
        "trigger": {"type": "event", "expect": ["x"], "posture": "Reactive", "threshold": 1, "within": 0},
    }
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api") as client:
        reading = asyncio.create_task(read_slowly(3))
        await asyncio.sleep(0)
        answer = await client.post("/automations/", json=document)
        answer.raise_for_status()
        print("answered", flush=True)
        await reading
    while not any(item.name == "one" for item in triggers.automations_by_id.values()):
        await asyncio.sleep(0.05)
    print("known", flush=True)

asyncio.run(main())
"""


def test_an_automation_is_written_while_the_server_reads_them(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    env = {
        **environment.for_children(settings), "RLFLOW_DATA_DIR": str(tmp_path), "PREFECT_PLUGINS_ENABLED": "0",
        "PREFECT_HOME": str(settings.prefect_home),
    }  # fmt: skip
    # Without the repair the process never ends.
    answer = subprocess.run(
        [sys.executable, "-c", WRITE], env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert answer.stdout.split() == ["answered", "known"], answer.stderr
