"""A loader module for ``mlflow.pyfunc``: it shows what reached it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> Echo:
    return Echo((Path(path) / "text").read_text(), str(model_config["suffix"]))


class Echo:
    def __init__(self, text: str, suffix: str) -> None:
        self._text, self._suffix = text, suffix

    def predict(self, model_input: pandas.DataFrame, params: Mapping[str, Any]) -> pandas.DataFrame:
        rows = model_input.to_dict("records")
        pictures = [0 if row.get("images") is None else len(row["images"]) for row in rows]
        limit = params["max_completion_tokens"]
        texts = [
            f"{self._text}{row['question']} {n} {limit}{self._suffix}" for row, n in zip(rows, pictures, strict=True)
        ]
        return pandas.DataFrame({"completion": texts})
