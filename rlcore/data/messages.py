"""Turns a problem into chat messages: prompt template and system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.sandbox

from rlcore.config import DataConfig
from rlcore.errors import ConfigError
from rlcore.types import Message

_TEMPLATES = Path(__file__).parent / "templates"


class MessageBuilder:
    """The messages of a problem, as ``data`` configures them.

    Raises:
        ConfigError: the template does not exist, does not parse, or uses other variables than ``content``.
    """

    def __init__(self, data: DataConfig) -> None:
        self._template = _compile(data.template)
        self._of_source = {name: _compile(own.template) for name, own in data.sources("train").items()}
        self._system_prompt = data.system_prompt

    def messages(self, question: str, context: Sequence[Message] = (), source_name: str = "") -> list[Message]:
        """Context and question, with one marker per image. The template wraps only the question. A source of a mixture
        may have its own template."""
        template = self._of_source.get(source_name, self._template)
        messages = [*context, Message("user", template.render(content=question))]
        if self._system_prompt is not None and messages[0].role != "system":
            messages.insert(0, Message("system", self._system_prompt))
        return messages


def _compile(name_or_path: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    text = template_text(name_or_path)
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        template = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"data.template {name_or_path!r} line {error.lineno}: {error.message}. Fix the template."
        ) from None
    if variables != {"content"}:
        raise ConfigError(
            f"data.template {name_or_path!r} uses {', '.join(sorted(variables)) or 'no variable'}. "
            "A template must use content, the problem's text, and no other variable."
        )
    return template


def template_text(name_or_path: str) -> str:
    """Text of a prompt template: a name under ``templates``, or the path of a file.

    Raises:
        ConfigError: no such template; lists the known names.
    """
    known = {path.stem: path for path in sorted(_TEMPLATES.glob("*.jinja"))}
    path = known.get(name_or_path, Path(name_or_path).expanduser())
    if not path.is_file():
        raise ConfigError(
            f"data.template {name_or_path!r} is neither a known template nor a file. "
            f"Allowed: {', '.join(known)}, or the path of a Jinja file that uses content."
        )
    return path.read_text(encoding="utf-8")
