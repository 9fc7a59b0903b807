"""Starts, asks and ends the process of a reward model (``rlcore.models.scoring``). No torch here."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rlcore.config.reward import ScoringModelConfig
from rlcore.errors import MemoryExhaustedError, RewardError, WorkerLostError
from rlcore.types import Problem

PROGRAM = "rlcore.models.scoring"
START_SECONDS = 600.0
_ARCHITECTURE = "ForSequenceClassification"
_MARKER = "<image>|<video>"
_ENVIRONMENT = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL", "VIRTUAL_ENV")
_GPU_ENVIRONMENT = ("CUDA_", "NVIDIA_")

Chat: TypeAlias = list[dict[str, str]]


def chat_of(problem: Problem, completion: str) -> Chat:
    """The conversation that is scored. A picture or video is ``[picture 1]``, because the model reads text only."""
    numbers = count(1)
    asked = [*((message.role, message.text) for message in problem.context), ("user", problem.question)]
    chat = [
        {"role": role, "content": re.sub(_MARKER, lambda _: f"[picture {next(numbers)}]", text)} for role, text in asked
    ]
    return [*chat, {"role": "assistant", "content": completion}]


def require_scoring_model(config: ScoringModelConfig) -> None:
    """Check the files of the folder, without loading weights.

    Raises:
        RewardError: it is no sequence-classification model with one label and a chat template.
    """
    folder, where = config.path, f"reward.model.path {config.path}"
    if not (folder / "config.json").is_file():
        raise RewardError(
            f"{where} is no folder with a config.json. Set it to the folder of a Hugging Face reward model."
        )
    settings = _json(folder / "config.json")
    classes = settings.get("architectures") or []
    if not any(str(name).endswith(_ARCHITECTURE) for name in classes):
        raise RewardError(
            f"{where} holds {', '.join(map(str, classes)) or 'no known architecture'}, and a reward model must be a "
            f"...{_ARCHITECTURE}. Name the folder of one."
        )
    labels = settings.get("id2label")
    number = len(labels) if isinstance(labels, dict) else settings.get("num_labels", 2)
    if number != 1:
        raise RewardError(
            f"{where} has {number} labels, and a reward model has one, its score. Name a model with num_labels=1."
        )
    tokenizer = folder / "tokenizer_config.json"
    templates = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    if not templates and not (tokenizer.is_file() and _json(tokenizer).get("chat_template")):
        raise RewardError(
            f"{where} has a tokenizer without a chat template, so question and completion cannot be joined as in the "
            "model's own training. Add its chat_template.jinja."
        )


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the folder's weights in this data type, from the headers of its safetensors files.

    Raises:
        RewardError: it has none.
    """
    elements = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        elements += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    if not elements:
        raise RewardError(f"reward.model.path {folder} has no safetensors files. Save the model again, as safetensors.")
    return elements * {"float32": 4, "bfloat16": 2}[dtype]


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RewardError(f"{path} cannot be read: {error}. Restore the folder of the reward model.") from None
    return tree if isinstance(tree, dict) else {}


class ScoringModel(Protocol):
    """A loaded reward model."""

    device: str

    def score(self, chats: Sequence[Chat]) -> list[float | str]:
        """The model's raw score of each conversation, or why it has none."""

    def close(self) -> None: ...


class ScoringProcess:
    """A process that holds the reward model. Use it from one thread; ``close`` may come from another."""

    def __init__(self, config: ScoringModelConfig, first_free_gpu: int | None) -> None:
        """
        Args:
            first_free_gpu: for ``device: auto``, the number of the first GPU that the run does not use. None: the run
                is on the CPU.

        Raises:
            RewardError: the model cannot be loaded.
        """
        require_scoring_model(config)
        allowed = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_GPU_ENVIRONMENT)
        }
        fixed = {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in each run
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=allowed | fixed,
        )
        self._closed = False
        timer = threading.Timer(START_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            settings = {"first_free_gpu": first_free_gpu, "parent": os.getpid(), **config.model_dump(mode="json")}
            self.device = str(self._exchange(settings)["device"])
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerLostError):
                raise RewardError(f"the reward model {config.path} could not be loaded: {error}") from None
            raise
        finally:
            timer.cancel()

    def score(self, chats: Sequence[Chat]) -> list[float | str]:
        """The model's raw score of each conversation, or why it has none.

        Raises:
            WorkerLostError: the process has died.
            MemoryExhaustedError: the batch does not fit.
        """
        scores = self._exchange({"chats": list(chats)})["scores"]
        return [
            score if isinstance(score, str) else score if math.isfinite(score) else f"the score is {score}"
            for score in scores
        ]

    def close(self) -> None:
        """Kill the process and wait for it."""
        self._closed = True
        self._process.kill()
        self._process.wait()

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            if self._closed:
                raise RewardError("the process of the reward model was closed.")
            raise WorkerLostError(
                f"the process of the reward model ended with {self._process.wait()}. See its output in trainer.log."
            )
        answer = json.loads(line)
        if "memory" in answer:
            raise MemoryExhaustedError(
                f"the reward model is out of memory: {answer['memory']}. Lower reward.model.batch_size, or set "
                "reward.model.device to another GPU or cpu."
            )
        if "error" in answer:
            raise RewardError(f"the reward model fails: {answer['error']}")
        return dict(answer)


def key_of(fingerprint: str, config: ScoringModelConfig, chat: Chat) -> str:
    """Hash of everything that a raw score depends on."""
    content = [fingerprint, config.max_tokens, config.dtype, chat]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
