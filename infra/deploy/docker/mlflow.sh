#!/bin/sh
# MLflow with users and passwords, over PostgreSQL and the object store. Its user table needs a file of settings, which
# is written here so that no password lies in an image; the administrator's comes from MLFLOW_AUTH_ADMIN_PASSWORD.
set -eu
umask 077
export MLFLOW_AUTH_CONFIG_PATH=/tmp/auth.ini
cat > "$MLFLOW_AUTH_CONFIG_PATH" <<INI
[mlflow]
default_permission = READ
database_uri = $MLFLOW_AUTH_DATABASE_URI
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
INI
exec mlflow server --app-name basic-auth --host 0.0.0.0 --port 5000 --workers 2 \
  --artifacts-destination "s3://$MLFLOW_BUCKET" --allowed-hosts "$MLFLOW_NAMES"
