"""No built-in reward runs text of a model or a dataset as code, neither as an answer nor as a reference answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config.reward import (
    ClevrCountReward,
    CountdownReward,
    DapoReward,
    GeoqaReward,
    Gsm8kReward,
    MathReward,
    MathVerifyReward,
    MultipleChoiceReward,
    R1vReward,
)
from rlcore.errors import RewardError
from rlcore.rewards import make_reward
from rlcore.rewards.expressions import NotAnExpression, parse_expression
from rlcore.rewards.grading import _parsed, math_equal, math_verify_equal
from rlcore.types import Problem
from tests.unit.cpu_time import timed

REWARDS = [
    MathReward(),
    MathVerifyReward(),
    R1vReward(),
    DapoReward(),
    GeoqaReward(),
    Gsm8kReward(),
    Gsm8kReward(method="flexible"),
    CountdownReward(),
    ClevrCountReward(),
    MultipleChoiceReward(),
]
# without integers and letters: mathruler compares those as text and never gets as far as sympy
TRUTHS = (r"\frac{1}{2}", r"2\sqrt{3}", "0.5")
CODE = "open('p','w')"  # leaves the file p in the current folder


def octal(mark: str, code: str = CODE) -> str:
    return "".join(f"{mark}{ord(character):03o}" for character in code)


ENCODED = {
    "octal": octal("\\textbackslash{}"),  # the review's
    "octal, \\textbackslash before a group": octal("{\\textbackslash}"),
    "octal, \\backslash": octal("\\backslash{}"),
    "octal, two backslashes": octal("\\\\"),
    "octal, plain": octal("\\"),
    "hex": "".join(f"\\textbackslash{{}}x{ord(c):02x}" for c in CODE),
    "unicode": "".join(f"\\textbackslash{{}}u{ord(c):04x}" for c in CODE),
    "fullwidth": "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in CODE),
    "plain": CODE.replace("'", "`"),
    "as it is": CODE,
}
CARRIERS = {
    "ln": 'ln("@")',
    "sqrt": 'sqrt("@")',
    "single quotes": "ln('@')",
    "three quotes": 'ln("""@""")',
    "bytes": 'ln(b"@")',
    "f-string": 'ln(f"{@}")',
    "raw string": 'ln(r"@")',
    "two strings": 'ln("@""")',
    "a sum": '1+ln("@")',
    "a power": '2**ln("@")',
    "a tuple": '(ln("@"),1)',
    "a list": '[ln("@")]',
    "a set": '\\{ln("@")\\}',
    "a subscript": 'x_{ln("@")}',
    "an index": 'ln[ln("@")]',
    "a fraction": '\\frac{ln("@")}{2}',
    "a root": '\\sqrt{"@"}',
    "an n-th root": '\\sqrt["@"]{2}',
    "text": '\\text{ln("@")}',
    "text in text": '\\text{\\text{ln("@")}}',
    "an operator": '\\operatorname{ln}("@")',
    "a macro": '\\ln("@")',
    "mathrm": '\\mathrm{ln("@")}',
    "a matrix": '\\begin{pmatrix}ln("@")\\\\1\\end{pmatrix}',
    "a condition": 'ln("@")if 1else 1',
    "or": '0or ln("@")',
    "a method": 'ln("@").n()',
    "no function": '"@"',
    "a variable": '\\variable{"@"}',
    "gcd": '\\gcd("@",1)',
    "a limit": '\\lim_{x\\to"@"}x',
    "evaluated at": 'x|_{x="@"}',
    "an equation": 'x="@"',
    "an implicit call": 'ln "@"',
    "a repeated decimal": '0.2[ln("@")]',
}
DIRECT = {
    "code": CODE,
    "import": "__import__('os').system('touch p')",
    "attributes": "().__class__.__base__.__subclasses__()[0]('p')",
    "attribute of a number": "2 .__class__('p')",
    "attribute of a constant": "pi.func.__init__.__globals__",
    "lambda": "(lambda:open('p','w'))()",
    "f-string": "f\"{open('p','w')}\"",
    "format": "'{}'.format(open('p','w'))",
    "percent": "'%s'\\%open('p','w')",
    "list": "[open('p','w')]",
    "comprehension": "[open('p','w')for x in(1,)]",
    "set": "\\{open('p','w')\\}",
    "tuple": "(open('p','w'),1)",
    "star": "*open('p','w'),",
    "walrus": "(x:=open('p','w'))",
    "statement": "1;open('p','w')",
    "line": "1\nopen('p','w')",
    "comment": "open('p','w')#",
    "eval": "eval(\"open('p','w')\")",
    "exec": "exec(open('p','w'))",
    "print": "print(open('p','w'))",
    "max": "max(open('p','w'))",
    "sympify": "sympify(\"open('p','w')\")",
    "symbol": 'Symbol("p").name',
    "integer": 'Integer(open("p","w"))',
    "italic letters": "\U0001d45c\U0001d45d\U0001d452\U0001d45b('p','w')",
    "fullwidth brackets": "open\uff08'p','w'\uff09",
    "combining mark": "o\u0301pen('p','w')",
    "operator open": "\\operatorname{open}(p,w)",
    "operator import": "\\operatorname{__import__}(os)",
    "text": "\\text{open('p','w')}",
    "mathrm": "\\mathrm{open('p','w')}",
    "mathbf": "\\mathbf{open('p','w')}+1",
    "input": "\\input{/etc/passwd}",
    "write18": "\\immediate\\write18{touch p}",
    "openout": "\\newwrite\\f\\immediate\\openout\\f=p",
    "lua": "\\directlua{io.open('p','w')}",
    "catcode": "\\catcode`\\@=0 @input{p}",
    "char": "\\char92 101",
    "verb": "\\verb|open('p','w')|",
}
CORPUS = {
    f"{carrier}, {name}": CARRIERS[carrier].replace("@", code) for carrier in CARRIERS for name, code in ENCODED.items()
}
CORPUS |= DIRECT

# parse_expr runs "from sympy import *"; _build writes a function of n arguments for polynomials of n variables
SYMPYS_OWN = ("parse_expr", "_build")

_seen: list[str] | None = None  # what ran, while someone watches


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is None:
        return
    if event == "exec":
        name, caller = getattr(arguments[0], "co_filename", ""), sys._getframe(1).f_code.co_name
        # compiled from text; a module has a file
        if name.startswith("<") and not name.startswith("<frozen") and caller not in SYMPYS_OWN:
            _seen.append(f"{name} in {caller}")
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "socket.__new__"):
        _seen.append(event)


sys.addaudithook(_hook)  # Python cannot take one away; it looks at nothing while no one watches


@contextmanager
def watching() -> Iterator[list[str]]:
    """What Python compiles from text and runs, and the processes and sockets it makes, while in the block."""
    global _seen
    for cached in (math_equal, math_verify_equal, _parsed):
        cached.cache_clear()
    _seen = seen = []
    try:
        yield seen
    finally:
        _seen = None


@pytest.fixture
def nothing_runs(tmp_path, monkeypatch) -> Iterator[None]:
    """The test fails if text runs as code, or leaves a file."""
    monkeypatch.chdir(tmp_path)
    with watching() as seen:
        yield
    assert seen == []
    assert list(tmp_path.iterdir()) == []


def completion(answer: str) -> str:
    return f"<think>a</think> \\boxed{{{answer}}} <answer>{answer}</answer>\n#### {answer}\nAnswer: {answer}"


def grade(config, answer: str, truth: str) -> None:
    problem = Problem("p", "?", (), truth, "test", {"nums": [1, 2], "target": truth})
    try:
        make_reward(config, max_completion_tokens=100)(completion(answer), problem, 5, "stop")
    except RewardError:  # a truth that the reward cannot use
        return


def test_the_corpus_is_large_enough():
    assert len(set(CORPUS.values())) > 300


@pytest.mark.parametrize("config", REWARDS, ids=lambda config: config.name)
def test_no_answer_and_no_truth_runs(config, nothing_runs):
    for number, payload in enumerate(CORPUS.values()):
        truth = TRUTHS[number % len(TRUTHS)]
        for answer, reference in ((payload, truth), (truth, payload), (payload, payload + "+0.5")):
            grade(config, answer, reference)


def test_an_answer_that_ran_before_is_wrong(nothing_runs):
    payload = CORPUS["ln, octal"]
    assert not math_equal(payload, r"\frac{1}{2}")
    assert not math_equal("0.5", payload)


def test_mathruler_without_our_parser_runs_them(tmp_path):
    """The corpus is worth something: what it holds does run where nothing stops it."""
    payloads = [CORPUS[name] for name in ("ln, octal", "text, octal", "two strings, octal")]
    script = "\n".join(
        (
            "import os",
            "from mathruler.grader import grade_answer",
            f"for number, payload in enumerate({payloads!r}):",
            r"    grade_answer(payload, r'\frac{1}{2}')",
            "    if os.path.exists('p'): os.rename('p', str(number))",
        )
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_the_watch_sees_code_that_runs():
    with watching() as seen:
        eval("1 + 1")
    assert seen == ["<string> in test_the_watch_sees_code_that_runs"]


FRAGMENTS = st.sampled_from(
    [
        *(
            "ln",
            "sqrt",
            "pi",
            "x",
            "y",
            "1",
            "23",
            "0.5",
            "1e9",
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            "+",
            "-",
            "*",
            "**",
            "/",
        ),
        *(
            "^",
            "!",
            ",",
            ".",
            "_",
            "=",
            "<",
            ":",
            ";",
            "'",
            '"',
            "#",
            "@",
            "%",
            "&",
            "|",
            "~",
            "\\",
            "\\textbackslash{}",
        ),
        *("\\frac", "\\text{", "\\sqrt", "\\operatorname{", "\\left(", "\\right)", "\\pi", "\\backslash", "\n", " "),
        *("lambda", "open", "eval", "__import__", "os", "or", "if", "else", "in", 'f"{', "octal", "\\157", "\\x6f"),
        *("ｌｎ", "𝑜", "²", "½", "٣", "é", "\u202e", "\x00", "\ud800", "α", "∞", "√"),
    ]
)
TEXT = st.one_of(st.lists(FRAGMENTS, max_size=12).map("".join), st.text(max_size=40))


def _fast(text: str) -> bool:
    """Powers may take sympy longer than a test has; a grading process has a deadline."""
    return text.count("**") + text.count("^") + text.count("!") < 2 and "e9" not in text


@settings(max_examples=400, derandomize=True)
@given(text=TEXT.filter(_fast), truth=st.sampled_from(TRUTHS))
def test_fuzzed_text_runs_nothing(text, truth):
    with watching() as seen:
        for candidate, reference in ((text, truth), (truth, text)):
            math_equal(candidate, reference)
            math_verify_equal(candidate, reference)
    assert seen == []


@settings(max_examples=400, derandomize=True)
@given(text=TEXT.filter(_fast))
def test_fuzzed_text_is_an_expression_or_refused(text):
    with watching() as seen:
        try:
            parsed = parse_expression(text)
        except Exception:  # noqa: BLE001 - sympy and Python refuse some of them in ways of their own
            parsed = sympy.Integer(0)
    assert isinstance(parsed, sympy.Expr)
    assert seen == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "9**9**9",
            "9^9^9",
            "2**(10**9)",
            "(9**9)**9999",
            "(9!)!",
            "10000!",
            "((((3!)!)!)!)",
            "1e999999999",
            "0.5**99999",
        ),
        *(
            "9e99**9999",
            "2**" * 300 + "2",
            "(" * 1000 + "1" + ")" * 1000,
            "-" * 4000 + "1",
            "1+" * 2400 + "1",
            "9" * 4999,
        ),
        *("sqrt(" * 400 + "2" + ")" * 400, "1" * 5001, "x" + "(x)" * 1500),
    ],
)
def test_what_is_too_large_is_refused_at_once(text):
    """A few milliseconds each; none may reach the deadline of a grading."""

    def refused() -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - sympy and Python refuse some of them in ways of their own
            parse_expression(text)

    _, seconds = timed(refused)
    assert seconds < 2


@pytest.mark.parametrize(
    "text", ["__import__('os')", "__import__(os)", "x.y", "_._", "[1]", "{1}", "'a'", "\\157", "1,2", "ｌｎ(2)", "x=1"]
)
def test_a_forbidden_character_or_node_is_refused(text):
    with pytest.raises(NotAnExpression):
        parse_expression(text)


@pytest.mark.parametrize(
    "text", ["id(2)", "all(2)", "1or 2", "not 1", "1if 2else 3", "lambda x", "5//2", "max(2)", "oo"]
)
def test_a_name_or_operator_that_is_not_listed_is_refused(text):
    with pytest.raises(Exception):  # noqa: B017, PT011
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2x", "2*x"),
        ("x2", "2*x"),
        ("3!", "6"),
        ("5!!", "15"),
        ("2sqrt(3)", "2*sqrt(3)"),
        ("-x^2", "-x**2"),
        ("ln^2(3)", "log(3)**2"),
        ("1/2+0.5", "1.00000000000000"),
        ("pi r^2", "pi*r**2"),
        ("αβ", "α*β"),
        ("2**-1", "1/2"),
        ("3i", "3*i"),
        ("a_1+__class__", "__class__ + a_1"),
        ("2e3", "2000.00000000000"),
    ],
)
def test_an_expression_is_what_sympy_makes_of_it(text, value):
    assert str(parse_expression(text)) == value
