#!/bin/bash
# Stands for the entry point of the image postgres:17-bookworm: the same variables, folders and order of steps.
set -eu
export PGDATA=/var/lib/postgresql/data
if [ "$(id -u)" = 0 ]; then
  install --directory --owner postgres /var/run/postgresql
  chown postgres "$PGDATA"
  chmod 700 "$PGDATA"
  cd /
  exec setpriv --reuid=postgres --regid=postgres --clear-groups "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username=postgres --no-sync --pwfile=<(echo "$POSTGRES_PASSWORD") > /dev/null
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  # As in the image, the first server listens on its socket alone.
  pg_ctl --options="-c listen_addresses=''" --wait start
  for file in /docker-entrypoint-initdb.d/*.sql; do
    PGPASSWORD=$POSTGRES_PASSWORD psql --set=ON_ERROR_STOP=1 --no-psqlrc --username=postgres --dbname=postgres --file="$file"
  done
  pg_ctl --mode=fast --wait stop
fi
exec "$@" -c listen_addresses='*'
