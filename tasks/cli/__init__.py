"""The command line: ``rlflow``."""

from tasks.cli.commands import app as app
