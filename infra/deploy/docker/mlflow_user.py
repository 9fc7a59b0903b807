"""Make the workers' user in MLflow, who is no administrator, or give it the password of now. Run by compose.yaml."""

from __future__ import annotations

import os

from mlflow.exceptions import MlflowException
from mlflow.server import get_app_client


def main() -> None:
    client = get_app_client("basic-auth", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    user, password = os.environ["MLFLOW_WORKER_USERNAME"], os.environ["MLFLOW_WORKER_PASSWORD"]
    try:
        client.create_user(user, password)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        client.update_user_password(user, password)


if __name__ == "__main__":
    main()
