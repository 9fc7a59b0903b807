"""The logger of flows and tasks, which removes secrets."""

from __future__ import annotations

import logging
import os
import re
import sys

LOGGER = "rlflow"
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|AUTH_STRING|CREDENTIAL)", re.I)
# Patterns of tokens. The groups of _KEPT stay, the rest becomes ***.
_SECRET_TEXT = re.compile(
    r"""
    (?P<url>://[^/\s:@"']*:)[^\s/"'<>]+(?=@)                       # user:password@host
    |\bhf_[A-Za-z0-9]{16,}\b
    |\b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    |\b(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})
    |\bgl(?:pat|dt|rt|ptt|soat|cbt|ft|agent)-[A-Za-z0-9_.-]{16,}
    |(?<![A-Za-z0-9_-])sk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}   # OpenAI, Anthropic and others
    |\b(?:xox[abceoprs]|xapp)-[A-Za-z0-9-]{10,}
    |(?P<hook>hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/)[\w/.-]+
    |\bwandb_v1_[A-Za-z0-9_]{16,}
    |(?P<wandb>\bwandb\ login\ (?:--\S+\ )*|\bapi\.wandb\.ai\s+login\s+\S+\s+password\s+)[0-9a-f]{40}\b
    |\bnpm_[A-Za-z0-9]{30,}
    |\bpypi-[A-Za-z0-9_-]{40,}
    |\bpn[ub]_[A-Za-z0-9]{20,}                                     # Prefect Cloud
    |\bAIza[A-Za-z0-9_-]{35}
    |\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}
    |\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*   # JSON web token
    |(?P<bearer>\bBearer\ |\bAuthorization["']?\s?[:=]\s?["']?Basic\ )[A-Za-z0-9._~+/=-]{12,}
    |(?P<aws>(?i:aws_?secret_?access_?key|secret_?key)["']?\s*[:=]\s*["']?)[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/])
    |(?P<variable>\b(?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|AUTH_STRING)=["']?)[^\s"'$<>(){},;]{8,}
    |(?P<literal>(?i:password|passwd|secret|api_?key|access_?key|(?:auth|access|api)_?token)["']?\s*[:=]\s*(?P<quote>["']))
     (?!\$)[^"'\n<>{}]{8,}(?=(?P=quote))
    """,
    re.VERBOSE,
)
# A key's block, also in a patch, where a sign precedes each line, and in JSON, where \\n ends one.
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)"
    r"(?:[A-Za-z0-9+/=:,.\s\\\"']|(?<=\n)-(?!-)){20,}(?:-?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)?"
)
_KEPT = ("url", "hook", "wandb", "bearer", "aws", "variable", "literal")


def redact(text: str) -> str:
    """Replace the values of secret-looking environment variables, and secret-looking text, by ``***``."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return without_password(text)


def without_password(text: str) -> str:
    """An address, or any other text, as it may be shown and stored: what looks like a secret is ``***``."""
    text = _PRIVATE_KEY.sub(_without_lines, text)
    return _SECRET_TEXT.sub(lambda match: "".join(match[name] or "" for name in _KEPT) + "***", text)


def _without_lines(match: re.Match[str]) -> str:
    """Keep the number of lines and the sign before each, so that a patch stays valid."""
    _, *lines = match[0].removeprefix(match[1]).split("\n")
    return "\n".join([f"{match[1]}***", *(f"{line[:1] if line[:1] in '+- ' else ''}***" for line in lines)])


def _redact_record(record: logging.LogRecord) -> bool:
    """Redact a record before any handler sees it: the console, the file and Prefect's page alike."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


def get_logger() -> logging.Logger:
    """The logger of flows and tasks. Prefect's page gets its records too (PREFECT_LOGGING_EXTRA_LOGGERS)."""
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_redact_record)  # the logger ignores a second one
    return logger


def log_to_console(level: int = logging.INFO) -> None:
    """Show rlflow's records on stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = get_logger()
    logger.setLevel(level)
    logger.addHandler(handler)
