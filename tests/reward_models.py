"""A tiny reward model with random weights: a sequence-classification model with one label, a tokenizer that knows
characters, and a chat template."""

from __future__ import annotations

import string
from pathlib import Path

import torch

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"


def tiny_reward_model(folder: Path, seed: int = 0) -> Path:
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", *string.printable])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
            initializer_range=0.5,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
