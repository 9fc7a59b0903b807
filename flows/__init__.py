"""Flows: the order of steps and nothing else."""

import tasks as tasks  # prepares the environment before a flow imports Prefect
