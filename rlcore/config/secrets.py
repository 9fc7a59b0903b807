"""No setting is a secret: settings are stored, logged and shown. What looks like one is refused before that."""

from __future__ import annotations

import re

from rlcore.errors import ConfigError

SECRET = r"://[^/\s:@]+:[^@\s/]+@|\bhf_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}\b"
"""A password in an address, a Hugging Face token, an AWS key."""


def refuse_secret(key: str, text: str) -> None:
    """
    Raises:
        ConfigError: ``text`` holds a secret; names the key, never the text.
    """
    if re.search(SECRET, text):
        raise ConfigError(
            f"{key} holds a password or a token, and settings are stored and shown. Leave it out: keys come from the "
            "environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN, MLFLOW_TRACKING_PASSWORD)."
        )
