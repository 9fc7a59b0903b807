"""What the settings refuse, and that no error and no text of theirs shows a password."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.logs import without_password
from infra.settings import Settings
from infra.stack.servers import mlflow_command, prefect_command

PASSWORD = "geheim123"


@pytest.mark.parametrize("field", ["prefect_database", "mlflow_database"])
def test_another_database_is_refused_without_its_address(field: str) -> None:
    with pytest.raises(ValidationError, match="Allowed: postgresql://") as caught:
        Settings(**{field: f"mysql://me:{PASSWORD}@host/db"})
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("store", [f"s3://key:{PASSWORD}@bucket/x", "bucket/x", "gs://bucket", "s3://", "s3://a b"])
def test_a_store_is_a_bucket_and_never_holds_keys(store: str) -> None:
    with pytest.raises(ValidationError, match="Allowed: s3://bucket/prefix") as caught:
        Settings(store=store)
    assert PASSWORD not in str(caught.value)
    assert Settings(store="s3://bucket/a/b/").store == "s3://bucket/a/b"


def test_passwords_are_in_no_command_line_and_no_text(tmp_path: Path) -> None:
    address = f"postgresql://me:{PASSWORD}@host/db"
    settings = Settings(data_dir=tmp_path, prefect_database=address, mlflow_database=address)
    for server in (prefect_command(settings, 1), mlflow_command(settings, 2)):
        assert PASSWORD not in " ".join(server.args)
        assert any(PASSWORD in value for value in server.variables.values()), "the server itself has to know it"
    assert PASSWORD not in repr(settings)
    assert PASSWORD not in settings.model_dump_json()
    assert without_password(settings.tracking_uri) == "postgresql+psycopg://me:***@host/db"


def test_servers_listen_on_loopback_by_default(tmp_path: Path) -> None:
    def hosts(settings: Settings) -> list[str]:
        servers = (prefect_command(settings, 1), mlflow_command(settings, 2))
        return [server.args[server.args.index("--host") + 1] for server in servers]

    assert hosts(Settings(data_dir=tmp_path)) == ["127.0.0.1", "127.0.0.1"]
    told = Settings(data_dir=tmp_path, host="0.0.0.0", allowed_hosts="lab.example")
    assert hosts(told) == ["0.0.0.0", "0.0.0.0"]
    assert prefect_command(told, 1).address == "http://127.0.0.1:1"
