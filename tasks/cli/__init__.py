"""The command line: ``rlflow``."""

from tasks.cli import models as models  # these add their commands
from tasks.cli import watch as watch
from tasks.cli.commands import app as app
