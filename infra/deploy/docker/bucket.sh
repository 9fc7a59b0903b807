#!/bin/sh
# MLflow's bucket, and a user of the object store who can reach that bucket alone. Run at each start; safe to repeat.
# Keys come by standard input and MC_HOST_objects: every user of the machine can read command lines.
set -eu
mc mb --ignore-existing objects/mlflow
mc admin policy create objects mlflow /policy.json
printf '%s\n%s\n' "$MLFLOW_S3_ACCESS_KEY" "$MLFLOW_S3_SECRET_KEY" | mc admin user add objects
if ! mc admin policy attach objects mlflow --user "$MLFLOW_S3_ACCESS_KEY"; then
  case $(mc admin user info objects "$MLFLOW_S3_ACCESS_KEY") in
    *"PolicyName: mlflow"*) ;; # it had the policy before; there is no grep in this image
    *) exit 1 ;;
  esac
fi
