"""Parses a written expression into a sympy expression, without running anything.

sympy's own parser turns text into Python code and evaluates it, so a completion could run code. Here sympy only
completes the notation (``2x``, ``3!``). The result is read as a syntax tree in which only a short list of nodes is
allowed.
"""

from __future__ import annotations

import ast
import builtins
import re
import types

import sympy
from sympy.parsing import sympy_parser

from rlcore.rewards.arithmetic import OPERATORS

MAX_CHARS = 5000  # above two answers of MAX_ANSWER_CHARS
MAX_BRACKETS = 200  # sympy's time grows with the square of their depth, and Python's parser allows no more
MAX_EXPONENT = 10_000
MAX_BITS = 100_000  # of a power of two numbers
MAX_FACTORIAL = 5000
MAX_DECIMAL_EXPONENT = 400

_ALLOWED = re.compile(r"[0-9a-zA-Z_α-ω+\-*/^().! ]*")  # no quotes, square brackets, backslashes, commas
_NAME = re.compile(r"[a-zA-Z_α-ω][a-zA-Z_0-9]*")
_DECIMAL = re.compile(r"[0-9_]*\.?[0-9_]*(?:[eE][+-]?([0-9]{1,9}))?")

_CONSTANTS = {"pi": sympy.pi, "I": sympy.I}
_FUNCTIONS = {"sqrt": sympy.sqrt, "ln": sympy.ln}
_FACTORIALS = {"factorial": sympy.factorial, "factorial2": sympy.factorial2}
_TRANSFORMATIONS = (
    *sympy_parser.standard_transformations,
    sympy_parser.implicit_multiplication_application,
)
# Names that sympy's parser does not treat as variables. It looks them up and calls none.
_KNOWN = {
    **{name: getattr(sympy, name) for name in sympy.__all__},
    **{name: value for name, value in vars(builtins).items() if isinstance(value, types.BuiltinFunctionType)},
    "max": sympy.Max,
    "min": sympy.Min,
}


class NotAnExpression(ValueError):
    """The text is too large, or holds more than numbers, variables, + - * / ^ and known functions."""


def parse_expression(text: str) -> sympy.Expr:
    """Parse an expression. Multiplication signs may be missing; ^ is a power.

    Raises:
        NotAnExpression: something is not allowed, or a number would be too large.
        Exception: sympy and Python raise many kinds of errors for text that cannot be parsed.
    """
    text = " ".join(text.split())
    if len(text) > MAX_CHARS or text.count("(") > MAX_BRACKETS or not _ALLOWED.fullmatch(text):
        raise NotAnExpression(f"{text[:100]!r} is too long, has too many brackets, or holds a forbidden character")
    return read_code(sympy_parser.stringify_expr(text.replace("^", "**"), {}, _KNOWN, _TRANSFORMATIONS))


def read_code(code: object) -> sympy.Expr:
    """Read the Python code that sympy's parser makes of a text, as a tree. It is not run.

    Raises:
        NotAnExpression: a node is not allowed, or a number would be too large.
        SyntaxError, ValueError, RecursionError, MemoryError: it is not a Python expression, or nested too deep.
    """
    if not isinstance(code, str):
        raise NotAnExpression(f"{code!r} is not text")
    return _value(ast.parse(code.strip(), mode="eval").body)


def _value(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.BinOp(left, operator, right):
            return _binary(operator, _value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(function, [argument], []):
            return _call(function, argument)
    raise NotAnExpression(f"{ast.dump(node)[:100]} is not allowed")


def _binary(operator: ast.operator, left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    if isinstance(operator, ast.Pow):
        return _power(left, right)
    if type(operator) not in OPERATORS:
        raise NotAnExpression(f"the operator {type(operator).__name__} is not allowed")
    return OPERATORS[type(operator)](left, right)


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    if exponent.is_Number:
        if not abs(exponent) <= MAX_EXPONENT:
            raise NotAnExpression(f"an exponent is above {MAX_EXPONENT}")
        if base.is_Number and base.is_finite and _bits(base) * abs(exponent) > MAX_BITS:
            raise NotAnExpression(f"a power has more than {MAX_BITS} bits")
    return base**exponent


def _bits(number: sympy.Expr) -> int:
    if isinstance(number, sympy.Float):
        _, mantissa, exponent, _ = number._mpf_
        return abs(int(exponent)) + int(mantissa).bit_length()
    return max(int(number.p).bit_length(), int(number.q).bit_length())


def _call(function: ast.expr, argument: ast.expr) -> sympy.Expr:
    """The calls that sympy's parser inserts around literals, and the few that an answer may contain."""
    match function, argument:
        case ast.Name("Integer"), ast.Constant(int(number)):
            return sympy.Integer(number)
        case ast.Name("Number"), ast.Constant(str(digits)) if digits.isascii() and digits.isdigit():
            return sympy.Integer(int(digits))
        case ast.Name("Float"), ast.Constant(str(decimal)) if _is_decimal(decimal):
            return sympy.Float(decimal)
        case ast.Name("Symbol"), ast.Constant(str(name)) if _NAME.fullmatch(name):
            return sympy.Symbol(name)
        case ast.Name(name), _ if name in _FUNCTIONS:
            return _FUNCTIONS[name](_value(argument))
        case ast.Name(name), _ if name in _FACTORIALS:
            number = _value(argument)
            if number.is_Number and not abs(number) <= MAX_FACTORIAL:
                raise NotAnExpression(f"a factorial of more than {MAX_FACTORIAL}")
            return _FACTORIALS[name](number)
    raise NotAnExpression(f"a call of {ast.dump(function)[:100]} is not allowed")


def _is_decimal(text: str) -> bool:
    matched = _DECIMAL.fullmatch(text)
    return matched is not None and int(matched[1] or 0) <= MAX_DECIMAL_EXPONENT
