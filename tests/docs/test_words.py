"""What the documentation names is there: messages, metrics, settings, values, files, links, and the reference."""

from __future__ import annotations

import ast
import importlib.util
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from infra.settings import Settings
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.config.base import flatten
from rlcore.errors import ConfigError, WorkerLostError
from rlcore.failures import Failure, classify
from rlcore.rewards.dry_run import dry_run
from tasks.cli.docs import page as reference
from tasks.experiments import experiment_values, load_experiment
from tasks.report.page import PANELS
from tests.docs import code
from tests.docs.pages import PAGES, ROOT, anchors, blocks, code_words, links, prose, quotes, sections

TROUBLE = ROOT / "docs" / "troubleshooting.md"
GROUPS = {name for name in ExperimentConfig.model_fields if name not in ("name", "seed")}
EXPERIMENTS = experiment_values()
ROWS = [re.split(r" (?<!\\)\| ", line) for line in reference().splitlines() if line.startswith("| `")]
KEYS = {row[0].strip("|` ") for row in ROWS if not row[0].startswith("| `RLFLOW_")}
# Whose words a foreign message is in; torch's are in C++, so that only what we do about them can be tested.
FOREIGN = {
    "Ray": "ray/exceptions.py",
    "transformers": "transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py",
    "vLLM": "vllm/v1/worker/utils.py",
}
FILE_SUFFIXES = (".py", ".md", ".json", ".jsonl", ".yaml", ".txt", ".jinja", ".html", ".parquet", ".log")
PLACES = (".", "rlcore", "tests/bench", "tests/bench/accepted", "tests/numerics")  # that names start from
EXAMPLES = {"rows.parquet", "my_template.jinja", "brief.jinja", "train.jsonl", "validation.jsonl"}  # the reader's
OF_OTHER_PROJECTS = {"train.py", "examples"}
METRIC_GROUPS = {"eval"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_the_reference_is_what_make_docs_writes() -> None:
    assert (ROOT / "docs" / "reference.md").read_text() == reference(), "run make docs"


def test_every_setting_has_a_help_text() -> None:
    assert not [row[0] for row in ROWS if not row[3].strip()]
    assert not [name for name, field in Settings.model_fields.items() if not field.description]


def test_the_reference_lists_every_setting_of_the_experiments() -> None:
    """The page as it is committed against the schema that pydantic makes."""
    schema = ExperimentConfig.model_json_schema()
    page = (ROOT / "docs" / "reference.md").read_text()
    rows = set(re.findall(r"^\| `([a-z_0-9.]+)`", page, re.MULTILINE))
    settings = set(_keys_of_schema(schema, schema["$defs"], ""))
    assert len(settings) > 120
    assert settings - rows == set()
    used = {key for values in EXPERIMENTS.values() for key, _ in flatten(values) if key not in ("health", "name")}
    mappings = tuple(f"{name}." for name in re.findall(r"^\| `([a-z_0-9.]+)` \| mapping \|", page, re.MULTILINE))
    assert "data.chat_template_arguments." in mappings  # whose keys are the user's, and so have no rows
    assert {key for key in used if not key.endswith(".name") and not key.startswith(mappings)} <= rows
    variables = set(re.findall(r"^\| `RLFLOW_([A-Z_]+)`", page, re.MULTILINE))
    assert {name.lower() for name in variables} == Settings.model_json_schema()["properties"].keys()


def _keys_of_schema(node: dict[str, Any], defs: dict[str, Any], prefix: str) -> Iterator[str]:
    """Dotted keys of the values of an object, those of all its choices included."""
    for name, value in node["properties"].items():
        key = f"{prefix}{name}"
        inner = [defs[ref.rpartition("/")[2]] for ref in _references(value)]
        objects = [item for item in inner if "properties" in item]
        for item in objects:
            yield from _keys_of_schema(item, defs, f"{key}.")
        if not objects and (name != "name" or not prefix):
            yield key


def _references(value: dict[str, Any]) -> Iterator[str]:
    if "$ref" in value:
        yield value["$ref"]
    for part in [*value.get("anyOf", []), *value.get("oneOf", []), *([value["items"]] if "items" in value else [])]:
        yield from _references(part)


@pytest.mark.parametrize("message", quotes(TROUBLE))
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert len(re.findall(r"[A-Za-z]", message)) >= 10, "too short to say anything"
    of, _, words = message.partition(": ")
    if of in FOREIGN:
        package, _, inside = FOREIGN[of].partition("/")
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        assert words in re.sub(r'"\s*f?"', "", (Path(folder) / inside).read_text())
    elif of == "torch":
        assert classify(RuntimeError(words)) is Failure.OUT_OF_MEMORY
    else:
        assert code.says(message.removeprefix("train: "))


def test_a_message_that_nobody_says_is_found() -> None:
    assert code.says("the gradient was not finite in ... steps in a row")
    assert code.says("problem ...: vLLM sees a prompt of ... tokens")
    assert not code.says("the gradient was infinite in ... steps in a row")
    assert not code.says("steps in a row ... the gradient was not finite")


def test_ray_s_words_are_not_the_class() -> None:
    """What the page says about them: the kernel's count decides, not the sentence."""
    assert classify(WorkerLostError("The actor died unexpectedly before finishing this task.")) is Failure.WORKER_LOST


@pytest.mark.parametrize(("title", "text"), sections(TROUBLE, 3).items())
def test_a_trouble_has_a_check_and_a_cure(title: str, text: str) -> None:
    check, _, cure = text.partition("**Cure.**")
    assert "**Check.**" in check
    assert re.search(r"`|\n    |message", check.partition("**Check.**")[2]), "no command, metric, file or message"
    assert len(cure.split()) >= 3
    assert re.search(r"^> |^No message", text, re.MULTILINE)


def test_each_class_of_failure_that_needs_a_person_is_a_trouble() -> None:
    named = {Failure(name) for name in re.findall(r"^Class: `(.*)`\.$", TROUBLE.read_text(), re.MULTILINE)}
    assert set(Failure) - named == {Failure.PREEMPTED, Failure.ROLLBACK, Failure.UNKNOWN}


@every_page
def test_metrics_are_produced(page: Path) -> None:
    text = " ".join(
        word for word in code_words(page) if "/" in word and ".py:" not in word and not word.endswith(FILE_SUFFIXES)
    )
    assert code.metrics_in(text) <= code.metrics(), page.name


def test_the_curves_of_the_report_are_metrics() -> None:
    assert {name for metrics in PANELS.values() for name in metrics} <= code.metrics()


def test_a_metric_that_nobody_gives_is_found() -> None:
    assert {"time/generate", "reward/accuracy", "optim/skipped", "loss/kl_ref"} <= code.metrics()
    assert "loss/kl" not in code.metrics()
    assert "reward/problem_id" not in code.metrics()


@every_page
def test_settings_exist_and_take_the_values_shown(page: Path) -> None:
    for word in code_words(page):
        for key, value in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(=\S+)?", word):
            module = (ROOT / "rlcore" / key.replace(".", "/")).with_suffix(".py")
            if key.split(".")[0] not in GROUPS or f".{key.rpartition('.')[2]}" in FILE_SUFFIXES or module.exists():
                continue
            known = any(item == key or item.startswith(f"{key}.") for item in [*KEYS, *_names()])
            foreign = page.name == "from-easyr1-and-verl.md" and key in code.texts()  # one that the translators read
            assert known or foreign or key.startswith("reward.arguments."), f"{page.name}: {key}"
            if value and "..." not in value and len(word.split()) == 1:
                assert _builds([f"{key}{value}"]), f"{page.name}: {word}"


def test_a_setting_that_is_refused_is_found() -> None:
    assert not _builds(["training.steps=0"])
    assert not _builds(["algorithm.loss.name=ppo"])
    assert not _builds(["training.step=1"])
    assert _builds(["algorithm.loss.max_ratio=4.0"])  # of a choice that has to be made first


@every_page
def test_variables_of_the_environment_are_settings(page: Path) -> None:
    names = set(re.findall(r"RLFLOW_[A-Z_]+[A-Z]", page.read_text()))
    settings = {f"RLFLOW_{name.upper()}" for name in Settings.model_fields}
    read_by_tests = {
        name
        for path in (ROOT / "tests").glob("*.py")
        for name in re.findall(r'environ\.get\("(RLFLOW_\w+)"', path.read_text())
    }
    assert names <= settings | read_by_tests


@every_page
def test_files_are_there_or_are_what_the_code_writes(page: Path) -> None:
    own = {match[1] for other in PAGES for block in blocks(other) if (match := re.match(r"# (\S+\.py)\n", block.text))}
    own |= {
        file for block in blocks(page) if block.language == "sh" for file in re.findall(r" > (\S+)$", block.text, re.M)
    }
    for word in code_words(page):
        name = word.rstrip("/")
        if " " in word or "=" in word or "*" in word or ":" in word or not re.fullmatch(r"[\w./-]+", word):
            continue
        if not (word.endswith("/") or name.endswith(FILE_SUFFIXES)) or code.metrics_in(f"{word}x"):
            continue
        here = [folder / name for folder in (page.parent, *(ROOT / place for place in PLACES))]
        known = own | EXAMPLES | OF_OTHER_PROJECTS | METRIC_GROUPS
        assert any(path.exists() for path in here) or code.writes(name) or name in known, f"{page.name}: {word}"


@every_page
def test_functions_and_classes_are_in_the_files_named(page: Path) -> None:
    for word in code_words(page):
        if match := re.fullmatch(r"([\w./-]+\.py):(\w+)", word):
            assert match[2] in _defined(match[1]), f"{page.name}: {word}"


def test_a_function_that_is_not_in_its_file_is_found() -> None:
    assert "train" in _defined("rlcore/training/loop.py")
    assert "train" in _defined("training/loop.py")
    assert "collect" not in _defined("training/loop.py")


def _defined(file: str) -> set[str]:
    """Names of the functions and classes of a file, which is named from the root or from rlcore."""
    path = ROOT / file if (ROOT / file).exists() else ROOT / "rlcore" / file
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_a_file_that_nobody_writes_is_found() -> None:
    assert code.unwritten() == []
    assert code.writes("trained/step-000020.json")
    assert code.writes("report/report.html")
    assert not code.writes("trained/stop-000020.json")
    assert not code.writes("no/such/dir/report.html")
    assert not code.writes("samples/report.html"), "both are written, but not one in the other"
    assert not code.writes("zzz/e.md")
    assert not code.writes("s.json")


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@every_page
def test_yaml_json_and_python_are_what_they_say(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "json":
                json.loads(block.text)
            case "python":
                compile(block.text, str(block), "exec")
            case "yaml":
                values = yaml.safe_load(block.text)
                assert values.keys() <= ExperimentConfig.model_fields.keys(), str(block)
                assert _builds([f"{key}={json.dumps(value)}" for key, value in _leaves(values)]), str(block)


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(file, "PNG")
    return file.getvalue()


def test_the_documented_rewards_pass_the_dry_run(tmp_path: Path) -> None:
    """In a grading process, with its sandbox: one of them reads the picture of its problem."""
    from rlcore.types import ImageRef, Problem

    found = [
        block
        for page in PAGES
        for block in blocks(page)
        if block.language == "python" and "\ndef reward(" in block.text
    ]
    assert len(found) == 3
    (tmp_path / "red.png").write_bytes(png("red"))
    pictures = (ImageRef("red", 28, 28, file=str(tmp_path / "red.png")),)
    for number, block in enumerate(found):
        file = tmp_path / f"reward_{number}.py"
        file.write_text(block.text)
        config = load_experiment("grpo-gsm8k-tiny", ["reward.name=user", f"reward.file={file}"])
        of_pictures = "problem.images" in block.text
        problem = Problem("p", "1 + 4 =", pictures, "red" if of_pictures else "5", "test", {"terms": 2})
        right, empty, long = dry_run(config.reward, max_completion_tokens=40, problem=problem)
        assert right.parts["accuracy"] == 1
        assert right.reward > empty.reward
        assert long.graded


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page for page in PAGES if "docs" in page.parts and page != index} <= linked
    assert "docs/index.md" in prose(ROOT / "README.md")


def _names() -> Iterator[str]:
    """Keys that choose: algorithm.loss.name."""
    return (f"{key.rpartition('.')[0]}.name" for key in KEYS if "." in key)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _builds(overrides: list[str]) -> bool:
    """Whether some experiment takes them, alone or with a choice that they need."""
    groups = {override.partition("=")[0].rpartition(".")[0] for override in overrides}
    choices: list[list[str]] = [
        [],
        ["reward.name=user", "reward.file=reward.py"],
        ["reward.name=judge", "reward.judge.url=http://judge/v1", "reward.judge.model=judge"],
        ["reward.name=model", "reward.model.path=model"],
        ["algorithm.correction.name=truncate"],
    ]
    choices += [
        [f"{group}.name={tag}"] for group in groups for tag in ("cispo", "gspo", "truncate", "mask", "pass_at_k")
    ]
    for values, choice in itertools.product(EXPERIMENTS.values(), choices):
        try:
            build_experiment(values, [*choice, *overrides])
        except ConfigError:
            continue
        return True
    return False
