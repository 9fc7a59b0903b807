"""``python -m rlcore.models.scoring``: the process of a reward model. It reads and answers one JSON object a line.

The first line names the model, and the answer its device. Each further line holds conversations, and the answer their
scores. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

_PARENT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward model and its tokenizer."""

    model: Any
    tokenizer: Any
    max_tokens: int

    @torch.inference_mode()
    def score(self, chats: Sequence[list[dict[str, str]]]) -> list[float | str]:
        """The logit of each conversation, or why it has none."""
        texts = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        results: list[float | str] = [
            f"the conversation has {len(tokens)} tokens, reward.model.max_tokens allows {self.max_tokens}"
            for tokens in ids
        ]
        fitting = [index for index, tokens in enumerate(ids) if 0 < len(tokens) <= self.max_tokens]
        # Without a token for padding the model takes the last token of a row, so it gets rows without padding.
        pad = self.model.config.get_text_config().pad_token_id
        batches = [fitting] if pad is not None else [[index] for index in fitting]
        for batch in filter(None, batches):
            length = max(len(ids[index]) for index in batch)
            rows = [ids[index] + [pad] * (length - len(ids[index])) for index in batch]
            masks = [[1] * len(ids[index]) + [0] * (length - len(ids[index])) for index in batch]
            device = self.model.device
            logits = self.model(
                input_ids=torch.tensor(rows, device=device), attention_mask=torch.tensor(masks, device=device)
            ).logits
            for index, value in zip(batch, logits[:, 0].float().tolist(), strict=True):
                results[index] = value
        return results


def load(settings: Mapping[str, Any]) -> Scorer:
    """
    Raises:
        ValueError: the device does not exist, or the model has not one label or no chat template.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    device = device_of(settings["device"], settings["first_free_gpu"])
    tokenizer = AutoTokenizer.from_pretrained(settings["path"])
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["path"], dtype=getattr(torch, settings["dtype"]), trust_remote_code=False
    )
    if model.config.num_labels != 1 or tokenizer.chat_template is None:
        raise ValueError(f"{settings['path']} needs one label and a chat template")
    return Scorer(model.to(device).eval(), tokenizer, settings["max_tokens"])


def device_of(wanted: str, first_free: int | None) -> str:
    """
    Raises:
        ValueError: there is no such GPU.
    """
    gpus = torch.cuda.device_count()
    if wanted == "auto":
        return f"cuda:{first_free}" if first_free is not None and first_free < gpus else "cpu"
    if wanted != "cpu" and int(wanted.partition(":")[2]) >= gpus:
        raise ValueError(
            f"reward.model.device is {wanted}, and {gpus} GPUs are visible here. Set it to one of them, to cpu or to "
            "auto."
        )
    return wanted


def answer(scorer: Scorer, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"scores": scorer.score(question["chats"])}
    except torch.OutOfMemoryError as error:
        return {"memory": str(error)}
    except Exception as error:  # noqa: BLE001 - the trainer gets every failure
        return {"error": f"{type(error).__name__}: {error}"}


def main(lines: BinaryIO, answers: BinaryIO) -> None:
    settings = json.loads(lines.readline())
    threading.Thread(target=_end_with, args=(settings["parent"],), daemon=True).start()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        scorer = load(settings)
    except torch.OutOfMemoryError as error:
        _write(answers, {"memory": str(error)})
        return
    except Exception as error:  # noqa: BLE001 - the trainer gets every failure
        _write(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"device": str(scorer.model.device)})
    for line in lines:
        _write(answers, answer(scorer, json.loads(line)))


def _write(answers: BinaryIO, tree: Mapping[str, Any]) -> None:
    answers.write(json.dumps(tree).encode() + b"\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """A forked child of the trainer may hold the other end of the pipe, so the end of the input tells too little."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    main(sys.stdin.buffer, own_output)
