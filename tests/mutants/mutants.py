"""Small faults of a source file: mutmut's operators, on decorated functions as well, which mutmut itself leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators

PACKAGES = ("rlcore/algorithms", "rlcore/training", "rlcore/segment", "tasks")
# What a fault in these would change is a type, or the size of something that the caller made.
SKIPPED_CALLS = {"len", "isinstance", "cast", "TypeVar", "ParamSpec"}
LOGGING_CALLS = {"debug", "info", "warning", "error", "exception"}


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    number: int  # among those of the file
    lines: tuple[int, int]  # of the statement, or of the head of a compound one
    in_function: bool
    message: bool  # changes a text for people and nothing else: see _is_message
    before: str
    after: str
    _module: cst.Module = field(repr=False)
    _node: cst.CSTNode = field(repr=False)
    _changed: cst.CSTNode = field(repr=False)

    def source(self) -> str:
        """The file with the fault in it."""
        module = self._module.deep_replace(self._node, self._changed)
        assert isinstance(module, cst.Module)
        return module.code

    @property
    def package(self) -> str:
        return next(package for package in PACKAGES if self.path.startswith(package + "/"))


def mutants_of(root: Path, path: str) -> list[Mutant]:
    collector = _Collector(path)
    collector.module = MetadataWrapper(cst.parse_module((root / path).read_text()))
    collector.module.visit(collector)
    return collector.mutants


class _Collector(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)
    module: MetadataWrapper

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.mutants: list[Mutant] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom):
            return False
        if isinstance(node, cst.Call) and _name_of(node.func) in SKIPPED_CALLS:
            return False
        if _is_type(node):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for changed in operator(node):
                    self._add(node, changed)
        return True

    def _add(self, node: cst.CSTNode, changed: cst.CSTNode) -> None:
        parents = self._parents(node)
        statement = next(
            (p for p in parents if isinstance(p, cst.BaseStatement | cst.SimpleStatementLine)), self.module.module
        )
        self.mutants.append(
            Mutant(
                path=self.path,
                number=len(self.mutants),
                lines=self._lines(statement),
                in_function=any(
                    isinstance(inner, cst.IndentedBlock) and isinstance(outer, cst.FunctionDef)
                    for inner, outer in zip(parents, parents[1:], strict=False)
                ),
                message=_is_message(node, changed, parents),
                before=self.module.module.code_for_node(node).strip(),
                after=self.module.module.code_for_node(changed).strip(),
                _module=self.module.module,
                _node=node,
                _changed=changed,
            )
        )

    def _parents(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The node, what it stands in, and so on up to the module."""
        parents = [node]
        while not isinstance(parents[-1], cst.Module):
            parents.append(self.get_metadata(ParentNodeProvider, parents[-1]))
        return parents

    def _lines(self, statement: cst.CSTNode) -> tuple[int, int]:
        start = self.get_metadata(PositionProvider, statement).start.line
        body = getattr(statement, "body", None)
        if isinstance(body, cst.IndentedBlock):
            return start, max(start, self.get_metadata(PositionProvider, body.body[0]).start.line - 1)
        return start, self.get_metadata(PositionProvider, statement).end.line


def _is_type(node: cst.CSTNode) -> bool:
    """``Literal[...]`` or the definition of a type: a fault in it would change no behaviour."""
    if isinstance(node, cst.AnnAssign):
        return _name_of(node.annotation.annotation) == "TypeAlias"
    inner = node.value if isinstance(node, cst.Assign) else node
    return isinstance(inner, cst.Subscript) and _name_of(inner.value) == "Literal"


def _name_of(node: cst.BaseExpression) -> str | None:
    """``cast`` of ``cast`` and of ``typing.cast``."""
    last = node.attr if isinstance(node, cst.Attribute) else node
    return last.value if isinstance(last, cst.Name) else None


def _is_message(node: cst.CSTNode, changed: cst.CSTNode, parents: list[cst.CSTNode]) -> bool:
    """A text with a space in it, alone or as the argument that was changed, or any argument of a line of the log."""
    for parent in parents:
        if isinstance(parent, cst.Call) and isinstance(parent.func, cst.Attribute):
            logger = parent.func.value
            named = isinstance(logger, cst.Call) or (isinstance(logger, cst.Name) and logger.value == "logger")
            if parent.func.attr.value in LOGGING_CALLS and named:
                return True
    if isinstance(node, cst.Call) and isinstance(changed, cst.Call):
        kept = {id(part.value) for part in changed.args}
        return any(id(part.value) not in kept and _is_text(part.value) for part in node.args)
    if isinstance(node, cst.Assign | cst.AnnAssign):
        return node.value is not None and _is_text(node.value)
    return _is_text(node)


def _is_text(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.SimpleString):
        return " " in node.raw_value
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    return isinstance(node, cst.ConcatenatedString) and (_is_text(node.left) or _is_text(node.right))
