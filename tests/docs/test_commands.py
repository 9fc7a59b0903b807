"""Every command of the documentation is run (test_run.py) or checked without running, and none is hidden."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.commands import check, is_command
from tests.docs.finding import Finding
from tests.docs.pages import MARKERS, PAGES, ROOT, Block, blocks, code_words, commands_of, simple_commands

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language == "sh"]
LANGUAGES = {"sh", "text", "python", "json", "yaml", "ini"}


def own_files() -> frozenset[str]:
    """Python files that pages tell the reader to write, named in their first line."""
    return frozenset(match[1] for block in BLOCKS if (match := re.match(r"# (\S+\.py)\n", block.text)))


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_can_be_what_they_say(block: Block) -> None:
    elsewhere = block.marker.startswith("elsewhere")
    commands = [words for words in commands_of(block) if words]
    assert commands, "an indented block without a command: put it into a text block"
    for words in commands:
        check(words, elsewhere=elsewhere, own_files=own_files())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_can_be_what_they_say(page: Path) -> None:
    for text in filter(is_command, code_words(page)):
        for words in simple_commands(text):
            check(words, own_files=own_files())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_other_block_hides_a_command(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            continue
        assert block.language in LANGUAGES or page.name == "design.md", f"{block}: {block.language!r} block"
        if page.name != "design.md":  # its drawing names the command that starts everything
            hidden = [line for line in block.text.splitlines() if is_command(line.strip().removeprefix("$ "))]
            assert not hidden, f"{block}: put {hidden} into an sh block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_marker_stands_before_a_block_of_commands(page: Path) -> None:
    comments = re.findall(r"<!-- (.*?) -->", page.read_text())
    markers = [comment for comment in comments if comment.startswith(MARKERS)]
    assert markers == [block.marker for block in blocks(page) if block.marker and block.language == "sh"]


def test_the_tutorial_is_run_in_order() -> None:
    run = [block for block in BLOCKS if block.is_run]
    assert len(run) >= 4
    assert {block.page for block in run} == {ROOT / "docs" / "tutorial.md"}
    assert [block.marker for block in run][0] == "run, Ctrl-C"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("kubectl apply -f x.yaml", "kubectl does not come with the project"),
        ("ray start --haed", "ray start has no option --haed"),
        ("ray begin --head", "ray with 'begin'"),
        ("tensorboard --lgdir data", "tensorboard has no option --lgdir"),
        ("cp infra/docker/.env.exmaple infra/docker/.env", "no file 'infra/docker/.env.exmaple'"),
        ("python -c 'from prefect.blocks.webhook import Webhoo'", r"has no \['Webhoo'\]"),
        ("python -c 'import prefectt'", "No module named 'prefectt'"),
        ("python -c 'import os import'", "invalid syntax"),
        ("RLFLOW_STORE=bucket/lab make demo", "RLFLOW_STORE does not take 'bucket/lab'"),
        ("make dmeo", "no 'dmeo'"),
        ("make demo DTAA=x", "no 'DTAA=x'"),
        ("RLFLOW_DATADIR=x make demo", "no RLFLOW_DATADIR"),
        ("export RLFLOW_STORAGE=x", "no RLFLOW_STORAGE"),
        ("python -m flows.train_grpo grpo-geo3k --sett seed=1", "unrecognized arguments: --sett"),
        ("python -m flows.train_grpo grpo-geo4k", "no experiment 'grpo-geo4k'"),
        ("python -m flows.train_grpo NAME --set training.step=4", "training.step: unknown key"),
        ("python -m flows.train_grpo NAME --set training.steps=0", "greater than or equal to 1"),
        ("python my_script.py", "no file 'my_script.py'"),
        ("python -m flows.train_grop grpo-geo3k", "no module flows.train_grop"),
        ("python -m flows.train_grpo grpo-geo3k --dry-run H300", "invalid choice: 'H300'"),
        ("python -m flows.ablate grpo-geo3k --gird 'seed=[1]'", "unrecognized arguments: --gird"),
        ("python -m flows.ablate grpo-geo3k --grid 'seed=[1]'", "an ablation sets name, seed"),
        ("python -m flows.ablate grpo-geo3k --point training.step=1", "training.step: unknown key"),
        ("prefect deployment run ablate -p experiment=grpo-geo3k -p 'grid=[\"seed=[1]\"]'", "an ablation sets name"),
        ("python -m tasks.deploying rayjobs grpo-geo3k", "invalid choice: 'rayjobs'"),
        ("python -m tasks.deploying rayjob grpo-geo4k", "no experiment 'grpo-geo4k'"),
        ("python -m tasks.lineage", "required: model"),
        ("python -m rlcore.config from-easyr2 config.yaml", "invalid choice: 'from-easyr2'"),
        ("python -m rlcore.segment start --spec=x", "has no option --spec"),
        ("prefect deployment run grpo-geo3k -p steps=0", "greater than or equal to 1"),
        ("prefect deployment run grpo-geo4k", "no deployment 'grpo-geo4k'"),
        ("prefect deployment run grpo/grpo-geo3k", "is called 'grpo-geo3k'"),
        ("prefect deployment run grpo-geo3k -p step=4", r"no parameters \['step'\]"),
        ("prefect flow-run stop ID", "prefect does not take"),
        ("pytest tests/nowhere", "no tests/nowhere"),
        ("pytest -m gpus tests/gpu", "no marker 'gpus'"),
        ("ls data | jq .", "no program 'jq'"),
    ],
)
def test_what_cannot_work_is_found(command: str, found: str) -> None:
    *before, last = simple_commands(command)
    for words in before:
        check(words)
    with pytest.raises(Finding, match=found):
        check(last)


def test_a_program_of_others_passes_where_the_page_says_that_it_is_elsewhere() -> None:
    check(["volc", "ml_task", "submit"], elsewhere=True)
    check(["kubectl", "apply", "--filename", "x.yaml"], elsewhere=True)
    with pytest.raises(Finding, match="no deployment 'grpo-geo4k'"):
        check(["docker", "compose", "exec", "worker", "prefect", "deployment", "run", "grpo-geo4k"], elsewhere=True)
    with pytest.raises(Finding, match="unrecognized arguments: --sett"):
        check(["python", "-m", "flows.train_grpo", "grpo-geo3k", "--sett", "seed=1"], elsewhere=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="about the help of openssl")
def test_options_of_an_installed_program_of_others_are_checked() -> None:
    check(["openssl", "rand", "-hex", "32"], elsewhere=True)
    with pytest.raises(Finding, match="openssl rand has no option -hax"):
        check(["openssl", "rand", "-hax", "32"], elsewhere=True)
