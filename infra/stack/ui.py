"""``python -m infra.stack.ui``: the Prefect and MLflow pages over the data folder, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from infra.settings import Settings
from infra.stack.login import how_to_log_in
from infra.stack.servers import mlflow_server, prefect_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    ports = parser.parse_args()
    settings = Settings()
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with (
        prefect_server(settings, ports.prefect_port) as prefect,
        mlflow_server(settings, ports.mlflow_port) as mlflow,
    ):
        sys.stdout.write(f"Prefect  {prefect}\nMLflow   {mlflow}\nLogin    {how_to_log_in(settings)}\n")
        sys.stdout.write("Ctrl-C ends both.\n")
        sys.stdout.flush()
        over.wait()


if __name__ == "__main__":
    main()
