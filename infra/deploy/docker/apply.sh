#!/bin/sh
# Prefect's work pools and all deployments of prefect.yaml, from /opt/rlflow of the image rlflow-worker. Safe to repeat.
# RLFLOW_GPU_SLOTS is how many runs the pool gpu takes at a time.
set -eu
for pool in gpu cpu; do
  prefect work-pool inspect "$pool" >/dev/null 2>&1 || prefect work-pool create "$pool" --type process
done
prefect work-pool set-concurrency-limit gpu "${RLFLOW_GPU_SLOTS:-1}"
prefect --no-prompt deploy --all
