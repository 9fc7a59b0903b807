"""The example of docs/howto/stores.md, as it stands there: make up on PostgreSQL and S3, and a run on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from infra.stack.services import read_state
from tests.long.local_stack import place_at, wait_for
from tests.shell import ROOT
from tests.stores import BUCKET, S3, Postgres, postgres_programs, postgres_server, s3_server

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    with s3_server(tmp_path / "s3.txt") as server:
        yield server


def test_the_example_of_the_page_runs(postgres: Postgres, s3: S3, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "stores.md").read_text()
    example = re.search(r"<!-- elsewhere: PostgreSQL[^>]*-->\n```sh\n(.*?)```", page, re.DOTALL)
    assert example
    # make up is that command, after an installation
    make = f'make() {{ "{sys.executable}" -m tasks.cli "$@"; }}\n'
    script = (
        "set -e\n" + make + example[1].replace("-p steps=4", """-p steps=4 -p 'overrides=["data.template=math"]'""")
    )
    programs = os.pathsep.join([str(postgres_programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres.port),
        "PGUSER": "tester",
        "PGPASSWORD": postgres.password,
        "PATH": programs,
        "FAKE_STEP_SECONDS": "0.2",
        **s3.variables,
    }
    with place_at(tmp_path, given) as place:
        try:
            answer = subprocess.run(
                ["bash", "-c", script], env=place.env, cwd=ROOT, capture_output=True, text=True, check=False
            )
            logs = "".join(path.read_text()[-3000:] for path in tmp_path.rglob("*.log"))
            assert answer.returncode == 0, answer.stdout + answer.stderr + logs
            assert "running of 1 at a time" in answer.stdout
            wait_for(lambda: any(place.settings.runs_dir.glob("*/finished")), "the end of the run")
            files = s3.files()
            found = f"{BUCKET}/lab/runs"
            wait_for(lambda: any(name.endswith("/finished") for name in files.find(found)), "its end in the bucket")
        finally:
            place.stack("down")
        assert read_state(place.settings) is None
        assert not (place.settings.mlflow_dir / "mlflow.db").exists()
        assert not (place.settings.prefect_home / "prefect.db").exists()
        for database, asked in (("prefect", "SELECT count(*) FROM flow_run"), ("mlflow", "SELECT count(*) FROM runs")):
            with psycopg.connect(postgres.url(database)) as connection:
                row = connection.execute(asked).fetchone()
            assert row is not None
            assert row[0] >= 1
        for log in tmp_path.rglob("*.log"):
            text = log.read_text(errors="replace")
            assert postgres.password not in text, log
            assert s3.secret_key not in text, log
