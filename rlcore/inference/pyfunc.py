"""A registered model as ``mlflow.pyfunc`` loads it: this is the loader module that its MLmodel file names.

It needs MLflow, transformers, torch and rlcore; no vLLM, no Ray, no Prefect.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.errors import DataError
from rlcore.inference.stored import StoredModel, read_settings
from rlcore.types import Message

if TYPE_CHECKING:
    from pandas import DataFrame

    from rlcore.inference.generator import Question


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> RegisteredModel:
    """MLflow calls this.

    Args:
        model_config: folder: where the weights are, if they were moved. dtype: torch's name, or auto. verify: compare
            the weights with their digest.
    """
    config = {"folder": "", "dtype": "auto", "verify": True} | dict(model_config or {})
    stored = read_settings(Path(path))
    folder = stored.weights(str(config["folder"]), verify=bool(config["verify"]))
    return RegisteredModel(stored, folder, str(config["dtype"]))


class RegisteredModel:
    """Answers questions as the evaluation did: the same prompts, images, limits and, unless asked otherwise, the
    likeliest token each time."""

    def __init__(self, stored: StoredModel, folder: Path, dtype: str = "auto") -> None:
        from rlcore.inference.generator import Generator

        self._generator = Generator(stored, folder, dtype)

    def predict(self, model_input: DataFrame, params: Mapping[str, Any] | None = None) -> DataFrame:
        """
        Args:
            model_input: columns question and, optional, images (each a path, or a file as base64), context (messages
                before the question), source (in ``data.mixture``) and chat_template_arguments (a mapping, as
                JSON text).
            params: temperature, top_p, max_completion_tokens, seed.

        Returns:
            Columns completion, finish_reason and num_tokens.

        Raises:
            DataError: an image cannot be read, or does not fit its question, or the arguments are no mapping.
        """
        from pandas import DataFrame

        from rlcore.inference.generator import Choice

        given = dict(params or {})
        choice = Choice(
            temperature=float(given.get("temperature", 0.0)),
            top_p=float(given.get("top_p", 1.0)),
            max_tokens=int(given["max_completion_tokens"]) if "max_completion_tokens" in given else None,
            seed=int(given.get("seed", 0)),
        )
        written = [self._generator.complete(_question(row), choice) for row in model_input.to_dict("records")]
        return DataFrame(
            {
                "completion": [item.text for item in written],
                "finish_reason": [item.finish_reason for item in written],
                "num_tokens": [item.num_tokens for item in written],
            },
            index=model_input.index,
        )


def _question(row: Mapping[Any, Any]) -> Question:
    from rlcore.inference.generator import Question

    return Question(
        text=str(row["question"]),
        images=tuple(read_image(text) for text in _items(row.get("images"))),
        context=tuple(Message(message["role"], message["text"]) for message in _items(row.get("context"))),
        source_name=source if isinstance(source := row.get("source"), str) else "",
        chat_template_arguments=_arguments(row.get("chat_template_arguments")),
    )


def _arguments(value: Any) -> dict[str, object]:
    """The row's own variables of the chat template; none for a missing value.

    Raises:
        DataError: a text that is no JSON mapping.
    """
    if not isinstance(value, str):
        return {}
    try:
        if isinstance(arguments := json.loads(value), dict):
            return arguments
    except ValueError:
        pass
    raise DataError(f'chat_template_arguments is {value[:80]!r}. Give a mapping as JSON, {{"enable_thinking": false}}.')


def _items(value: Any) -> list[Any]:
    """A list, a tuple or an array; nothing for a missing value, which pandas shows as None or NaN."""
    return list(value) if isinstance(value, Iterable) else []


def read_image(text: str) -> bytes:
    """A picture's file: ``text`` is a data URL, base64, or a path.

    Raises:
        DataError: it is none of them.
    """
    try:
        if text.startswith("data:"):
            return base64.b64decode(text.partition(",")[2], validate=True)
        return Path(text).read_bytes() if _is_file(text) else base64.b64decode(text, validate=True)
    except (OSError, ValueError):
        raise DataError(
            f"the image {text[:80]!r} is no file here and no base64. Give a path, base64, or a data URL."
        ) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path
        return False
