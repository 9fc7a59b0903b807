"""One logger for people, with secrets taken out."""

from __future__ import annotations

import logging
import os
import re
import sys

LOGGER = "rlflow"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|AUTH_STRING|CREDENTIAL)", re.I)
_SECRET_TEXT = re.compile(
    r"(?P<before>://[^/\s:@]+:)[^@\s/]+(?=@)"  # user:password@host
    r"|\bhf_[A-Za-z0-9]{16,}\b|\bAKIA[0-9A-Z]{16}\b|(?P<bearer>Bearer )[A-Za-z0-9._~+/=-]{12,}"
)


def redact(text: str) -> str:
    """Replace the values of secret-looking environment variables, and secret-looking text, by ``***``."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return without_password(text)


def without_password(uri: str) -> str:
    """An address as it may be shown and stored."""
    return _SECRET_TEXT.sub(lambda match: f"{match['before'] or match['bearer'] or ''}***", uri)


class RedactingFilter(logging.Filter):
    """Redacts a record before any handler sees it: the console, the file and Prefect's page alike."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def get_logger() -> logging.Logger:
    """The logger of flows and tasks. Prefect's page gets its records too (PREFECT_LOGGING_EXTRA_LOGGERS)."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(item, RedactingFilter) for item in logger.filters):
        logger.addFilter(RedactingFilter())
    return logger


def log_to_console(level: int = logging.INFO) -> None:
    """Show rlflow's records on stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = get_logger()
    logger.setLevel(level)
    logger.addHandler(handler)
