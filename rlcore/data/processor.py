"""A model's processor: its tokenizer, and its image processor if it takes images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.process import make_transformers_lean

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class TextProcessor:
    """The processor of a language model: a tokenizer, and no images."""

    image_processor = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(conversation, **options))


def load_processor(model: ModelConfig) -> Any:
    """The model's processor (``image_processor``, ``tokenizer``); a ``TextProcessor`` for a language model.

    Raises:
        ModelError: no such folder or hub id, files that do not load, or no chat template.
    """
    make_transformers_lean()
    if model.path == "tiny":
        from rlcore.data import tiny

        geometry = model.tiny.task == "geometry"
        return tiny.build_processor(model.tiny.family) if geometry else TextProcessor(tiny.build_text_tokenizer())
    from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

    folder = Path(model.path)
    local = folder.is_dir()
    if not local and (folder.is_absolute() or model.path[0] in ".~" or model.path.count("/") != 1):
        raise ModelError(
            f"model.path {model.path!r}: no such folder. Allowed: tiny, a Hugging Face id (owner/name), "
            "or a folder with config.json, tokenizer and safetensors."
        )
    # A language model's folder has no processor config. For a hub id AutoProcessor finds out.
    text_only = local and not any((folder / name).is_file() for name in _PROCESSOR_FILES)
    try:
        loaded = (AutoTokenizer if text_only else AutoProcessor).from_pretrained(
            str(folder) if local else model.path,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.path {model.path!r}: its tokenizer or processor does not load: {error}. "
            f"A model folder needs tokenizer.json and, for images, a processor config. {_listing(folder)}"
        ) from error
    processor = TextProcessor(loaded) if isinstance(loaded, PreTrainedTokenizerBase) else loaded
    if not (processor.chat_template or processor.tokenizer.chat_template):
        raise ModelError(
            f"model.path {model.path!r} has no chat template. {_listing(folder)}"
            "Add a chat_template.jinja, or set model.path to an instruction-tuned model."
        )
    return processor


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    return f"Found: {', '.join(sorted(file.name for file in folder.iterdir())[:12]) or 'an empty folder'}. "
