"""Every command of the documentation is run (test_run.py) or checked without running, and none is hidden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prefect import flow
from typer.models import CommandInfo

from tasks.cli import app
from tests.docs import ran
from tests.docs.commands import check, is_command
from tests.docs.finding import Finding
from tests.docs.modules import check_rlflow
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
            check(
                words, own_files=own_files(), on_path=page.name == "design.md"
            )  # its commands are what our processes start


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_the_examples_of_a_commands_help_can_be_what_they_say(command: CommandInfo) -> None:
    assert command.callback is not None
    name = command.callback.__name__.replace("_", "-")
    examples = [
        line for line in map(str.strip, str(command.callback.__doc__).splitlines()) if line.startswith("rlflow")
    ]
    assert bool(examples) == (name not in ("point", "up", "down", "status", "ui", "docs"))
    for line in examples:
        (words,) = simple_commands(line)
        assert words[1] == name
        check([f".venv/bin/{words[0]}", *words[1:]])


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


def test_the_list_of_commands_that_a_test_runs_is_what_make_docs_writes() -> None:
    assert ran.PAGE.read_text() == ran.with_list(ran.PAGE.read_text()), "run make docs"
    for block in COMMANDS:
        assert not (test := ran.test_of(block)) or (ROOT / test).exists()


def test_the_tutorial_is_run_in_order() -> None:
    run = [block for block in BLOCKS if block.is_run]
    assert len(run) >= 4
    assert {block.page for block in run} == {ROOT / "docs" / "tutorial.md"}
    assert [block.marker for block in run][0] == "run, Ctrl-C"


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("kubectl apply -f x.yaml", "kubectl does not come with the project"),
        (".venv/bin/ray start --haed", "ray start has no option --haed"),
        (".venv/bin/ray begin --head", "ray with 'begin'"),
        (".venv/bin/tensorboard --lgdir data", "tensorboard has no option --lgdir"),
        ("cp infra/deploy/docker/.env.exmaple infra/deploy/docker/.env", "no file 'infra/deploy/docker/.env.exmaple'"),
        (".venv/bin/python -c 'from prefect.blocks.webhook import Webhoo'", r"has no \['Webhoo'\]"),
        (".venv/bin/python -c 'import prefectt'", "No module named 'prefectt'"),
        (".venv/bin/python -c 'import os import'", "invalid syntax"),
        ("RLFLOW_STORE=bucket/lab make demo", "RLFLOW_STORE does not take 'bucket/lab'"),
        ("make dmeo", "no 'dmeo'"),
        ("make demo DTAA=x", "no 'DTAA=x'"),
        ("RLFLOW_DATADIR=x make demo", "no RLFLOW_DATADIR"),
        ("export RLFLOW_STORAGE=x", "no RLFLOW_STORAGE"),
        ("rlflow train grpo-geo3k", r"write \.venv/bin/rlflow"),
        ("python -m pytest", r"write \.venv/bin/python"),
        ("prefect deployment run grpo-geo3k", r"write \.venv/bin/prefect"),
        (
            ".venv/bin/rlflow train grpo-geo3k --sett seed=1",
            "--sett.*Allowed: --allow-changes, --data, ",
        ),
        (".venv/bin/rlflow train grpo-geo4k", "no experiment 'grpo-geo4k'"),
        (".venv/bin/rlflow train NAME --set training.step=4", "training.step: unknown key"),
        (".venv/bin/rlflow train NAME --set training.steps=0", "training.steps: found 0. Allowed: whole number, >= 1."),
        (".venv/bin/python my_script.py", "no file 'my_script.py'"),
        (".venv/bin/rlflow trian grpo-geo3k", "No such command 'trian'.*Allowed: train, fork"),
        (".venv/bin/python -m tests.bench.setp", "no module tests.bench.setp"),
        (".venv/bin/rlflow estimate grpo-geo3k --device H300", "no device 'H300'. Allowed: "),
        (".venv/bin/rlflow ablate grpo-geo3k --gird 'seed=[1]'", "No such option: --gird"),
        (".venv/bin/rlflow ablate grpo-geo3k --grid 'seed=[1]'", "an ablation sets name, seed"),
        (".venv/bin/rlflow ablate grpo-geo3k --point training.step=1", "training.step: unknown key"),
        (
            ".venv/bin/prefect deployment run ablate -p experiment=grpo-geo3k -p 'grid=[\"seed=[1]\"]'",
            "an ablation sets name",
        ),
        (".venv/bin/rlflow deploy rayjobs grpo-geo3k", "'rayjobs' is not one of 'rayjob'"),
        (".venv/bin/rlflow deploy rayjob grpo-geo4k", "no experiment 'grpo-geo4k'"),
        (".venv/bin/rlflow --hlep", "rlflow has no option --hlep"),
        (".venv/bin/rlflow lineage", "Missing argument 'MODEL'"),
        (".venv/bin/rlflow migrate easyr2 config.yaml", "'easyr2' is not one of 'easyr1', 'verl'"),
        (".venv/bin/python -m rlcore.jobs.segment start --spec=x", "has no option --spec"),
        (".venv/bin/prefect deployment run grpo-geo3k -p steps=0", "greater than or equal to 1"),
        (".venv/bin/prefect deployment run grpo-geo4k", "no deployment 'grpo-geo4k'"),
        (".venv/bin/prefect deployment run grpo/grpo-geo3k", "is called 'train-grpo'"),
        (".venv/bin/prefect deployment run grpo-geo3k -p step=4", "unexpected keyword argument 'step'"),
        (".venv/bin/prefect deployment run merge", "missing a required argument: 'run_id'"),
        (".venv/bin/prefect deployment run grpo-geo3k -p steps=four", "unable to parse string as an integer"),
        (".venv/bin/rlflow evaluate --on NAME", "Missing argument 'MODEL'"),
        (".venv/bin/rlflow evaluate RUN --on NAME --steps 4", "No such option: --steps"),
        (".venv/bin/rlflow merge NAME RUN", "unexpected extra argument"),
        (".venv/bin/rlflow merge RUN --set rollout.group_size=4", "No such option: --set"),
        (".venv/bin/rlflow merge RUN --data FOLDER", "No such option: --data"),
        (".venv/bin/rlflow prepare NAME --run-id RUN", "No such option: --run-id"),
        (".venv/bin/prefect flow-run stop ID", "prefect does not take"),
        (".venv/bin/pytest tests/nowhere", "no tests/nowhere"),
        (".venv/bin/pytest tests/unit/test_lease.py::test_nothing", "test_lease.py has no test test_nothing"),
        (".venv/bin/pytest -m gpus tests/gpu", "no marker 'gpus'"),
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
    with pytest.raises(Finding, match="No such option: --sett"):
        check([".venv/bin/rlflow", "train", "grpo-geo3k", "--sett", "seed=1"], elsewhere=True)


def test_options_of_an_installed_program_of_others_are_checked() -> None:
    check(["openssl", "rand", "-hex", "32"], elsewhere=True)
    with pytest.raises(Finding, match="openssl rand has no option -hax"):
        check(["openssl", "rand", "-hax", "32"], elsewhere=True)


def test_a_command_that_calls_its_flow_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes these words, and the flow does not take what the command makes of them."""

    @flow
    def swapped(experiment: str) -> None: ...

    monkeypatch.setattr("flows.merge.merge_run", lambda run: swapped(run, experiment=run))
    with pytest.raises(Finding, match="multiple values for argument 'experiment'"):
        check_rlflow(["merge", "RUN"])
