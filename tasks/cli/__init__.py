"""The command line: ``rlflow``."""

from tasks.cli import models as models  # adds its commands
from tasks.cli.commands import app as app
