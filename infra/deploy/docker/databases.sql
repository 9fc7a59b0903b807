-- Run once by psql, in an empty volume. Each server has a user of its own, who can reach its own database alone.
\getenv prefect PREFECT_DB_PASSWORD
\getenv mlflow MLFLOW_DB_PASSWORD
\getenv mlflow_users MLFLOW_USERS_DB_PASSWORD

CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE ROLE mlflow_users LOGIN PASSWORD :'mlflow_users';

CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_users OWNER mlflow_users;

REVOKE CONNECT ON DATABASE postgres, template1, prefect, mlflow, mlflow_users FROM PUBLIC;
