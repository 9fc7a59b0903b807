"""The chat template of a server that writes prompts as training did: the prompt template around the last message of the
user, and the system prompt before conversations without one."""

from __future__ import annotations

from typing import Any

from rlcore.config import DataConfig
from rlcore.data.messages import template_text
from rlcore.data.pixels import IMAGE_MARKER
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import ModelError
from rlcore.types import Message

# Jinja has no assignment across loops but through a namespace. Contents are text, or lists of parts.
_HEAD = """\
{%- macro rlflow_prompt(content) -%}TEMPLATE{%- endmacro -%}
{%- set rlflow = namespace(messages=[], parts=[], text="") -%}
{%- if SYSTEM is not none and messages and messages[0].role != "system" -%}
{%- set rlflow.messages = [{"role": "system", "content": SYSTEM}] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if loop.last and message.role == "user" -%}
{%- if message.content is string -%}
{%- set rlflow.messages = rlflow.messages + [{"role": "user", "content": rlflow_prompt(message.content)}] -%}
{%- else -%}
{%- for part in message.content -%}
{%- set rlflow.text = rlflow.text + (part.text if part.type == "text" else "MARKER") -%}
{%- endfor -%}
{%- for piece in rlflow_prompt(rlflow.text).split("MARKER") -%}
{%- if not loop.first -%}
{%- set rlflow.parts = rlflow.parts + [{"type": "image"}] -%}
{%- endif -%}
{%- if piece -%}
{%- set rlflow.parts = rlflow.parts + [{"type": "text", "text": piece}] -%}
{%- endif -%}
{%- endfor -%}
{%- set rlflow.messages = rlflow.messages + [{"role": "user", "content": rlflow.parts}] -%}
{%- endif -%}
{%- else -%}
{%- set rlflow.messages = rlflow.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = rlflow.messages -%}
"""
_QUESTIONS = ("How many sides?", "  Find x.\n\nA. 1\nB. 2\n")


def chat_template(processor: Any, data: DataConfig) -> str:
    """The model's chat template with the prompts of ``data``.

    Raises:
        ModelError: it would give other prompts than training, because a template uses what chat templates cannot.
    """
    own = str(processor.chat_template or processor.tokenizer.chat_template)
    system = _literal(data.system_prompt)
    template = template_text(data.template)
    template = template.removesuffix("\n")  # as Jinja does at the end of a file
    head = _HEAD.replace("SYSTEM", system).replace("MARKER", IMAGE_MARKER).replace("TEMPLATE", template)
    _require_same_prompts(processor, data, head + own)
    return head + own


def _literal(text: str | None) -> str:
    """``text`` as a Jinja expression."""
    if text is None:
        return "none"
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'


def _require_same_prompts(processor: Any, data: DataConfig, template: str) -> None:
    """
    Raises:
        ModelError: some prompt is another one.
    """
    prompts = PromptBuilder(processor, data)
    sees = processor.image_processor is not None
    for question in _QUESTIONS:
        for number in (0, 1) if sees else (0,):
            text = IMAGE_MARKER * number + question
            for context in ((), (Message("system", "Be brief."),)):
                expected = prompts.chat_text(text, number, context)
                messages = [{"role": message.role, "content": _parts(message.text, sees)} for message in context]
                messages.append({"role": "user", "content": _parts(text, sees)})
                actual = processor.apply_chat_template(
                    messages,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **data.chat_template_arguments,
                )
                if actual != expected:
                    raise ModelError(
                        f"the server cannot write the prompts of training: it would send {actual!r} instead of "
                        f"{expected!r}. Start it with --plain, and let its clients write the prompt."
                    )


def _parts(text: str, sees: bool) -> str | list[dict[str, str]]:
    if not sees:
        return text
    first, *others = text.split(IMAGE_MARKER)
    pieces: list[dict[str, str]] = [{"type": "text", "text": first}]
    for piece in others:
        pieces += [{"type": "image"}, {"type": "text", "text": piece}]
    return [part for part in pieces if part.get("text") != ""]
