"""What the tiny policies share: a tokenizer of bytes, a chat template, and a supervised run that stops in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlcore.data.tiny import END_OF_TURN, PAD

IGNORED = -100  # label of a token that is not learned


_WARM_UP_STEPS = 20
_MAX_GRAD_NORM = 1.0
_LOSS_MEMORY = 0.97


def draw_weights(make: Callable[[], Any], seed: int, weight_std: float, embedding_std: float) -> Any:
    """The model that ``make`` builds, every matrix drawn anew; torch's default generator is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # Hugging Face has set norms to one and biases to zero
                parameter.normal_(std=weight_std)
        model.get_input_embeddings().weight.normal_(std=embedding_std)
    return model


def sampling_defaults(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Plain sampling at temperature 1, up to the end of the turn."""
    token = tokenizer.convert_tokens_to_ids
    return GenerationConfig(
        bos_token_id=token(PAD),
        eos_token_id=[token(END_OF_TURN), token(PAD)],
        pad_token_id=token(PAD),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )


def learn_until(
    model: nn.Module, loss_of: Callable[[int], Tensor], *, learning_rate: float, enough_loss: float, max_steps: int
) -> int:
    """Train ``model`` in place on ``loss_of(step)``, steps counted from 1; returns the steps taken.

    The run ends when the loss's running mean falls to ``enough_loss``, after ``max_steps`` at the latest. A skill is
    learnt within a hundred steps that come sooner or later depending on the seed: a fixed number would leave some
    seeds blind and others with nothing to learn.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _WARM_UP_STEPS, total_iters=_WARM_UP_STEPS)
    steps = track(range(1, max_steps + 1), "warm start", console=Console(stderr=True))
    running_loss = math.inf
    step = 0
    model.train()
    for step in steps:
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        warm_up.step()
        latest = loss.item()
        running_loss = latest if step == 1 else _LOSS_MEMORY * running_loss + (1 - _LOSS_MEMORY) * latest
        if running_loss <= enough_loss:
            break
    model.eval()
    return step
