"""The layout of a published benchmark: a row whose problem is spread over several columns becomes a row with a text, a
list of images and a list of choices."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from string import ascii_uppercase

import jinja2
import jinja2.meta
import jinja2.sandbox

from rlcore.config import DataConfig
from rlcore.config.data import LayoutConfig
from rlcore.data.pixels import IMAGE_MARKER
from rlcore.data.prepare.files import Row, cell
from rlcore.errors import ConfigError

_MAX_LIST_CHARS = 20_000  # of the text of a list
_SINGLE = ("id_column", "choices_column")
_REFERENCE = re.compile(r"<image (\d{1,2})>")
_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment()


def columns_of(data: DataConfig) -> dict[str, str]:
    """The columns that the layout needs, by the setting that names each.

    Raises:
        ConfigError: a Jinja text does not parse.
    """
    layout = data.layout
    if layout is None:
        return {"data.problem_column": data.problem_column}
    needed = {f"data.layout.image_columns ({name})": name for name in layout.image_columns}
    needed |= {f"data.layout.{key}": name for key in _SINGLE if (name := getattr(layout, key)) is not None}
    needed |= _variables("data.layout.system_prompt", layout.system_prompt)
    if layout.problem is None:
        return {"data.problem_column": data.problem_column, **needed}
    return {**_variables("data.layout.problem", layout.problem), **needed}


def lay_out(row: Row, data: DataConfig) -> Row:
    """The row with text, answer and images in ``data.problem_column``, ``answer_column`` and ``images_column``, and the
    columns ``choices`` and ``answers`` (right answers besides the first) where it has them.

    Raises:
        ConfigError: a Jinja text does not parse.
    """
    layout = data.layout
    if layout is None:
        return row
    result = {name: value for name, value in row.items() if name not in layout.image_columns}
    text = cell(row, data.problem_column)
    if layout.problem is not None:
        text = _compiled("data.layout.problem", layout.problem).render(**row)
    choices = _choices(row, layout)
    answer = cell(row, data.answer_column)
    answers: list[object] = [*_texts(answer)] or [answer]
    first, *others = answers
    if choices:
        first = _letter(first, choices, layout)
        lines = (f"({letter}) {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
        text = "\n".join((f"{text}\n\nChoices:", *lines)) if isinstance(text, str) else text
        result["choices"] = [_REFERENCE.sub(r"image \1", choice) for choice in choices]
    elif others:
        result["answers"] = others
    images = _images(row, data, layout)
    if isinstance(text, str):
        text, images = _with_markers(text, images)
    if layout.system_prompt is not None:
        text = _with_system(text, _compiled("data.layout.system_prompt", layout.system_prompt).render(**row))
    return {**result, data.problem_column: text, data.answer_column: first, data.images_column: images}


def _with_system(problem: object, system: str) -> object:
    """The problem as chat messages that begin with a system message: its own, else ``system``."""
    messages = problem if isinstance(problem, list) else [{"role": "user", "content": problem}]
    first = messages[0] if messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _images(row: Row, data: DataConfig, layout: LayoutConfig) -> list[object]:
    """Image n of a text at index n - 1. None: the row has no such image."""
    if layout.image_columns:
        return [row.get(name) for name in layout.image_columns]
    value = cell(row, data.images_column)
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _with_markers(text: str, images: list[object]) -> tuple[str, list[object]]:
    """Markers in place of ``<image 2>``, and the images in the order of their markers. Without markers in the text, all
    images come first. Images that a text with markers does not mention come first too."""
    if IMAGE_MARKER in text:
        return text, [image for image in images if image is not None]
    numbers = [int(number) - 1 for number in _REFERENCE.findall(text)]
    mentioned = [n for n in numbers if 0 <= n < len(images) and images[n] is not None]
    before = [n for n, image in enumerate(images) if image is not None and n not in mentioned]

    def marker(reference: re.Match[str]) -> str:
        return IMAGE_MARKER if int(reference[1]) - 1 in mentioned else reference[0]

    text = IMAGE_MARKER * len(before) + _REFERENCE.sub(marker, text)
    return text, [images[n] for n in (*before, *mentioned)]


def _choices(row: Row, layout: LayoutConfig) -> list[str]:
    if layout.choices_column is None:
        return []
    return _texts(cell(row, layout.choices_column))


def _letter(answer: object, choices: list[str], layout: LayoutConfig) -> object:
    """The letter of the right choice."""
    if layout.choice_given_as == "letter":
        return answer
    matches = [letter for letter, choice in zip(ascii_uppercase, choices, strict=False) if choice == str(answer)]
    return matches[0] if matches else None  # None is rejected as an empty answer


def _texts(value: object) -> list[str]:
    """A list of texts, or the text of such a list, as Python prints it. Anything else: an empty list."""
    if isinstance(value, str) and value.startswith("[") and len(value) <= _MAX_LIST_CHARS:
        try:
            value = ast.literal_eval(value)  # reads literals only
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return []
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            return []  # "[0, 1]" is an interval or a pair, and one answer
    return [str(item) for item in value if item is not None] if isinstance(value, list) else []


def _variables(setting: str, text: str | None) -> dict[str, str]:
    """The columns that a Jinja text uses, by the setting that names each."""
    names = [] if text is None else sorted(jinja2.meta.find_undeclared_variables(_parsed(setting, text)))
    return {f"{setting} ({name})": name for name in names}


def _parsed(setting: str, text: str) -> jinja2.nodes.Template:
    try:
        return _ENVIRONMENT.parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{setting} {text!r}: {error.message}. Fix the Jinja text.") from None


@lru_cache(maxsize=16)
def _compiled(setting: str, text: str) -> jinja2.Template:
    _parsed(setting, text)
    return _ENVIRONMENT.from_string(text)
