"""The ``rlflow`` command. Subcommands import their modules when they run, so that help and completion are quick."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from infra.errors import InfraError
from infra.settings import Settings
from rlcore.errors import RlflowError

if TYPE_CHECKING:
    from pydantic import BaseModel


class Commands(TyperGroup):
    """Prints errors of rlflow as one sentence with exit code 1, and the known commands after an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            visible = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
            error.message += f" Allowed: {', '.join(visible)}."
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (RlflowError, InfraError) as error:
            sys.exit(f"{type(error).__name__}: {error}")


class Command(TyperCommand):
    """Prints the known options after an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            if hasattr(error, "possibilities"):
                options = sorted(name for item in self.params for name in item.opts if name.startswith("--"))
                error.message += f". Allowed: {', '.join([*options, '--help'])}."
                error.possibilities = None
            raise


app = typer.Typer(
    cls=Commands,
    help="GRPO experiments on language and vision-language models, run as Prefect flows.",
    epilog="Start here: rlflow train grpo-geo3k-tiny",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Occasion(StrEnum):
    FAILED = "failed"
    FINISHED = "finished"


def experiment_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    from tasks.experiments import experiment_values

    return [name for name in experiment_values() if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    runs = Settings().runs_dir.glob(f"{incomplete}*/experiment.json")
    return sorted(path.parent.name for path in runs)


def setting_names(incomplete: str) -> list[str]:
    """For the shell's completion: the dotted keys of the experiments in prefect.yaml."""
    from tasks.experiments import experiment_values, load_experiment

    keys = {key for name in experiment_values() for key in load_experiment(name).flat()}
    return [f"{key}=" for key in sorted(keys) if key.startswith(incomplete)]


def suite_names(incomplete: str) -> list[str]:
    """For the shell's completion: suites and groups of them."""
    from rlcore.evaluation.suites import all_suites

    suites = all_suites()
    groups = {group for suite in suites.values() for group in suite.groups}
    return [name for name in [*suites, *sorted(groups)] if name.startswith(incomplete)]


Experiment = Annotated[
    str, typer.Argument(metavar="EXPERIMENT", help="A name in prefect.yaml.", autocompletion=experiment_names)
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run: the name of its folder.", autocompletion=run_names)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.", autocompletion=setting_names),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder with train and validation files, or its URI (s3://bucket/folder), instead of the named datasets.",
    ),
]
RunId = Annotated[
    str | None,
    typer.Option("--run-id", metavar="RUN", help="Name of a new run, or of one to continue.", autocompletion=run_names),
]
EXPERIMENTS, MODELS, STACK, PROJECT = "Experiments", "Runs and models", "Local stack and clusters", "Project"


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def train(
    experiment: Experiment,
    overrides: Overrides = None,
    data: Data = None,
    run_id: RunId = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Continue a run with other values than it was started with.")
    ] = False,
) -> None:
    """Train: from raw data to a merged, verified, registered model.

    \b
    rlflow train grpo-geo3k-tiny
    rlflow train grpo-geo3k-tiny --set training.steps=40 --set seed=1
    rlflow train grpo-geo3k-tiny --run-id NAME
    """
    from tasks import experiments as form
    from tasks.cli.foreground import overrides_of, run_once, say_how_to_continue
    from tasks.run import new_run_id

    given, run_id = overrides_of(overrides, data), run_id or new_run_id(experiment)
    form.configure(experiment, given, run_id=run_id)

    def call() -> BaseModel:
        from flows.train_grpo import train_grpo

        return train_grpo(experiment, overrides=given, run_id=run_id, allow_changes=allow_changes)

    run_once(call, lambda: say_how_to_continue(run_id), module="flows.train_grpo")


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def fork(
    run: Run,
    step: Annotated[
        int | None, typer.Option(metavar="STEP", help="A committed step of the run. Default: its last one.")
    ] = None,
    overrides: Overrides = None,
    data: Data = None,
    run_id: RunId = None,
) -> None:
    """Train a new run that starts from a checkpoint of another one, with other values.

    Without other values it goes on as that run did, bit for bit. The original run stays as it is.

    \b
    rlflow fork RUN --step 40 --set training.learning_rate=1e-6
    rlflow fork RUN --set training.steps=400 --run-id NAME
    """
    from flows.train_grpo import train_grpo
    from infra.settings import Settings
    from tasks import experiments as form
    from tasks.cli.foreground import overrides_of, run_once, say_how_to_continue
    from tasks.fork import fork_run
    from tasks.run import existing_run, new_run_id

    trunk = existing_run(run, Settings())
    experiment, given = trunk.experiment.name, overrides_of(overrides, data)
    form.configure(experiment, given, run_id=run)  # refuses wrong values before the fork's folder is made
    forked = fork_run(trunk, step, run_id or new_run_id(experiment), Settings())
    run_once(
        lambda: train_grpo(experiment, overrides=given, run_id=forked.run_id, allow_changes=True),
        lambda: say_how_to_continue(forked.run_id),
    )


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def prepare(experiment: Experiment, overrides: Overrides = None, data: Data = None) -> None:
    """Prepare both datasets of an experiment, images resized. A training run then finds them done.

    \b
    rlflow prepare grpo-geo3k
    rlflow prepare grpo-geo3k --data FOLDER
    """
    from flows.prepare_data import prepare_data
    from tasks import experiments as form
    from tasks.cli.foreground import overrides_of, run_once, say_how_to_continue

    given = overrides_of(overrides, data)
    form.configure(experiment, given)
    run_once(lambda: prepare_data(experiment, overrides=given), say_how_to_continue)


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def contamination(
    train: Annotated[
        Path, typer.Argument(metavar="TRAIN", help="A prepared dataset with images resized: a folder in data/datasets.")
    ],
    evaluation: Annotated[Path, typer.Argument(metavar="EVALUATION", help="Another one: the problems to evaluate on.")],
    completions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Completions of an evaluation: also print the accuracy on the clean part."),
    ] = None,
    pairs: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each duplicate as a line of JSON.")] = None,
) -> None:
    """Count the problems of an evaluation that training has too: exact and near duplicates of texts and images.

    \b
    rlflow contamination data/datasets/TRAIN data/datasets/EVALUATION
    rlflow contamination data/datasets/TRAIN data/datasets/EVALUATION --pairs duplicates.jsonl
    """
    from tasks.cli.contamination import contamination_tables

    typer.echo(contamination_tables(train, evaluation, completions=completions, pairs=pairs), nl=False)


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def ablate(
    experiment: Experiment,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=[VALUE,...]", help="Values of a setting; several grids are combined."),
    ] = None,
    point: Annotated[
        list[str] | None, typer.Option(metavar="'KEY=VALUE ...'", help="The settings of one point.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="SEED,...", help="Seeds of each point.")] = None,
    rungs: Annotated[int | None, typer.Option(help="Comparisons; each drops the worse points.")] = None,
    keep: Annotated[float | None, typer.Option(help="Share of the points that continue after a rung.")] = None,
    retries: Annotated[int | None, typer.Option(help="Retries of a failed point.")] = None,
    trunk: Annotated[
        str | None, typer.Option("--from", metavar="RUN@STEP", help="Make the points forks of a run, from this step.")
    ] = None,
    overrides: Overrides = None,
    data: Data = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="NAME", help="Name of a new ablation, or of one to continue.")
    ] = None,
) -> None:
    """Compare points around an experiment, each with several seeds.

    \b
    rlflow ablate grpo-geo3k-tiny --grid 'training.learning_rate=[1e-4, 1e-3]' --seeds 0,1,2
    rlflow ablate grpo-geo3k-tiny --from RUN@40 --grid 'training.learning_rate=[1e-4, 1e-3]'
    rlflow ablate grpo-gsm8k --point 'algorithm.loss.name=gspo algorithm.aggregation=sequence_mean_token_mean'
    """
    from flows.ablate import ablate as ablate_flow
    from tasks.ablation.study import plan_ablation
    from tasks.cli.foreground import overrides_of, run_once, say_how_to_continue
    from tasks.run import new_run_id

    arguments: dict[str, Any] = {
        "experiment": experiment,
        "overrides": overrides_of(overrides, data),
        "run_id": run_id or new_run_id(experiment),
        "grid": grid or None,
        "points": [shlex.split(words) for words in point] if point else None,
        "seeds": _integers("--seeds", seeds) if seeds is not None else None,
        "rungs": rungs,
        "keep": keep,
        "retries": retries,
        "trunk": trunk,
    }
    plan_ablation(**arguments)
    run_once(lambda: ablate_flow(**arguments), lambda: say_how_to_continue(arguments["run_id"]))


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: allowed are whole numbers with commas between: 0,1,2") from None


@app.command(cls=Command, hidden=True)
def point(ablation: str, name: str, seed: int, steps: int) -> None:
    """Train one point of an ablation up to ``steps`` and evaluate it. ``rlflow ablate`` starts this."""
    from flows.ablation_point import ablation_point
    from tasks.cli.foreground import run_once

    run_once(lambda: ablation_point(ablation, name, seed, steps), ends_with_parent=True)


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def estimate(
    experiment: Experiment,
    overrides: Overrides = None,
    run_id: RunId = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="A GPU: H100, H200, ...")] = "H100",
) -> None:
    """Estimate memory per GPU and time per step, without a GPU, weights or data.

    \b
    rlflow estimate grpo-geo3k
    rlflow estimate grpo-geo3k --device H200 --set training.tokens_per_microbatch=32768
    """
    from infra.logs import log_to_console
    from tasks import experiments as form
    from tasks.cli.estimate import dry_run

    log_to_console()
    typer.echo(dry_run(form.configure(experiment, overrides, run_id=run_id), device).model_dump_json())


@app.command(cls=Command, rich_help_panel=EXPERIMENTS)
def migrate(
    trainer: Annotated[
        Literal["easyr1", "verl"], typer.Argument(metavar="TRAINER", help="The trainer that the configuration is for.")
    ],
    words: Annotated[list[str], typer.Argument(metavar="[CONFIG.yaml] [KEY=VALUE]...")],
    rows: Annotated[
        int | None, typer.Option(help="Training problems; an epoch is this divided by the batch size.")
    ] = None,
) -> None:
    """Print EasyR1's or verl's configuration as an experiment for prefect.yaml, with an account of every key.

    \b
    rlflow migrate easyr1 config.yaml worker.rollout.n=6
    rlflow migrate verl algorithm.adv_estimator=grpo data.train_batch_size=512 --rows 12000
    """
    from rlcore.migrate import translate

    typer.echo(translate(trainer, words, rows), nl=False)


@app.command(cls=Command, rich_help_panel=MODELS)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run. With --suite also a model folder, a Hugging Face id (owner/name), or the address of an "
            "OpenAI-compatible server (http://HOST:PORT/v1).",
            autocompletion=run_names,
        ),
    ],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="EXPERIMENT",
            help="Experiment that gives validation problems, reward and evaluation settings. Default: the run's own.",
            autocompletion=experiment_names,
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SUITE",
            help="A benchmark suite or a group of them, such as math-vl; may be repeated.",
            autocompletion=suite_names,
        ),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first so many problems of each suite.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model's name at the address.")
    ] = None,
    key_variable: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with the key of the address.")
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to the address at a time.")] = 16,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with train and validation files, or its URI (s3://bucket/folder), instead of the named "
            "datasets. With --suite: a folder with one folder or file per suite.",
        ),
    ] = None,
) -> None:
    """Evaluate the newest whole checkpoint of a run, or any model on benchmark suites.

    \b
    rlflow evaluate RUN
    rlflow evaluate RUN --on grpo-math12k --set evaluation.samples=4
    rlflow evaluate RUN --suite math-text --suite mmmu --problems 100
    rlflow evaluate ./FOLDER --suite gsm8k --data FOLDER
    rlflow evaluate http://HOST:8000/v1 --model NAME --suite aime
    """
    from tasks.cli.foreground import overrides_of, run_once, say_how_to_continue

    if suite:
        if on is not None:
            raise typer.BadParameter("--on and --suite exclude each other: both say which problems are evaluated")
        from flows.evaluate import evaluate_suites
        from tasks.suites import SuiteOptions, base_experiment, suite_experiments

        options = SuiteOptions(
            model=model, suites=tuple(suite), served_name=served_name, key_variable=key_variable,
            concurrency=concurrency, problems=problems, data=data, overrides=tuple(overrides or ()),
        )  # fmt: skip
        suite_experiments(options, base_experiment(options, Settings()))
        run_once(lambda: evaluate_suites(**options.model_dump(mode="json")), say_how_to_continue)
        return
    if problems is not None or served_name is not None:
        raise typer.BadParameter("--problems and --model need --suite (without it: --set evaluation.problems=100)")
    from flows.evaluate import evaluate_run
    from tasks.evaluate import suite_of
    from tasks.run import existing_run

    given = overrides_of(overrides, data)
    suite_of(existing_run(model, Settings()), on, given)
    run_once(lambda: evaluate_run(model, on, given), say_how_to_continue)


@app.command(cls=Command, rich_help_panel=MODELS)
def compare(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C]...",
            help="Runs (RUN or RUN:STEP), folders of evaluations, or registered models (NAME@ALIAS, NAME/VERSION).",
            autocompletion=run_names,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which of several evaluated policies is better than the first, on the same problems, with intervals.

    \b
    rlflow compare RUN:0 RUN
    rlflow compare grpo-geo3k@champion RUN --json
    """
    from tasks.compare import compare_policies, format_comparisons

    typer.echo(format_comparisons(compare_policies(policies, Settings()), json=json))


@app.command(cls=Command, rich_help_panel=MODELS)
def merge(run: Run) -> None:
    """Merge the newest whole checkpoint of a run to a Hugging Face folder, verify it and register it.

    \b
    rlflow merge RUN
    """
    from flows.merge import merge_run
    from tasks.cli.foreground import run_once, say_how_to_continue
    from tasks.run import existing_run

    existing_run(run, Settings())
    run_once(lambda: merge_run(run), say_how_to_continue)


@app.command(cls=Command, rich_help_panel=MODELS)
def check_model(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A model folder or a Hugging Face id.")],
    overrides: Overrides = None,
) -> None:
    """Compare the trainer, transformers and vLLM on a model. Ends with exit code 1 if they differ.

    \b
    rlflow check-model FOLDER
    rlflow check-model FOLDER --set resources.device=cpu --set model.lora.rank=16
    """
    from infra.logs import log_to_console
    from tasks.models import check_path

    log_to_console()
    typer.echo(check_path(path, overrides or []).markdown(), nl=False)


@app.command(cls=Command, rich_help_panel=MODELS)
def lineage(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="NAME (its newest version), NAME@ALIAS, NAME/VERSION.")],
    step: Annotated[
        int | None, typer.Option(help="Show the rows and images that this optimizer step was trained on.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a registered model was made from.

    \b
    rlflow lineage grpo-geo3k@verified
    rlflow lineage grpo-geo3k/3 --step 120
    """
    from tasks.lineage import format_lineage

    typer.echo(format_lineage(model, Settings(), step=step, json=json))


@app.command(cls=Command, rich_help_panel=MODELS)
def publish(run: Run) -> None:
    """Send the committed steps of a run that MLflow or a named tracker lacks.

    \b
    rlflow publish RUN
    """
    from infra.logs import log_to_console
    from tasks.driver.publish import publish_run

    log_to_console()
    publish_run(run, Settings())


@app.command(cls=Command, rich_help_panel=STACK)
def up() -> None:
    """Start Prefect, MLflow and workers in the background, or apply changed settings to them."""
    from infra.stack import control, login

    settings = Settings()
    state, file = control.up(settings), shlex.quote(str(login.login_file(settings)))
    typer.echo(f"Prefect  {state.prefect}\nMLflow   {state.mlflow}\nLogin    {login.how_to_log_in(settings)}")
    typer.echo(
        f'Elsewhere than here: export PREFECT_API_URL={state.prefect}/api PREFECT_API_AUTH_STRING="$(cat {file})"'
    )


@app.command(cls=Command, rich_help_panel=STACK)
def down() -> None:
    """Stop the stack. Runs commit first and continue at the next start."""
    from infra.stack import control

    typer.echo("The stack is down." if control.down(Settings()) else "The stack was down already.")


@app.command(cls=Command, rich_help_panel=STACK)
def status() -> None:
    """Show the services of the stack and what its work pools do."""
    from infra.stack import control

    typer.echo(control.describe(Settings()))


@app.command(cls=Command, rich_help_panel=STACK)
def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this nothing is changed.")] = False,
    older_than: Annotated[
        int | None, typer.Option(min=1, metavar="DAYS", help="Default: RLFLOW_CLEAN_DAYS, 30 days.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every item.")] = False,
) -> None:
    """Show what nobody needs in the data folder, its size and the reason; with --yes remove it.

    \b
    rlflow clean
    rlflow clean --older-than 7 --yes
    """
    from tasks.cli.clean import clean_here

    typer.echo(clean_here(Settings(), older_than, act=yes, json=json))


@app.command(cls=Command, rich_help_panel=STACK)
def ui(
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's page.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's page.")] = 5000,
) -> None:
    """Show the Prefect and MLflow pages over the data folder, until Ctrl-C."""
    from infra.stack import control

    control.show_pages(Settings(), prefect_port, mlflow_port)


@app.command(cls=Command, rich_help_panel=STACK)
def deploy(
    where: Annotated[
        Literal["rayjob", "raycluster", "vemlp"],
        typer.Argument(metavar="WHERE", help="rayjob: one run on KubeRay; raycluster: a lasting cluster; vemlp."),
    ],
    experiment: Experiment,
    overrides: Overrides = None,
    run_id: RunId = None,
    values: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Values of your cluster, instead of the values.yaml of rlflow.")
    ] = None,
) -> None:
    """Print the files that run an experiment on a cluster.

    \b
    rlflow deploy rayjob grpo-geo3k-32b --set seed=1 > job.yaml
    """
    from tasks.cli.deploy import cluster_files

    typer.echo(cluster_files(where, experiment, overrides or (), run_id, values), nl=False)


@app.command(cls=Command, rich_help_panel=STACK)
def notify(
    block: Annotated[
        str | None, typer.Argument(metavar="[TYPE/NAME]", help="A block of the Prefect server: webhook/team.")
    ] = None,
    on: Annotated[list[Occasion] | None, typer.Option(help="Default: both.")] = None,
    flow: Annotated[list[str] | None, typer.Option(metavar="FLOW", help="Default: the training flow.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the automations instead.")] = False,
) -> None:
    """Notify people of failed or finished runs, through a Prefect block that has the address.

    \b
    rlflow notify webhook/team
    rlflow notify slack-webhook/team --on failed
    rlflow notify --remove
    """
    from tasks.cli.notify import FLOW, notify_through

    if block is None and not remove:
        raise typer.BadParameter("name the block to notify, for example webhook/team, or give --remove")
    for line in notify_through(None if remove else block, on or list(Occasion), flow or (FLOW,)):
        typer.echo(line)


@app.command(cls=Command, rich_help_panel=PROJECT)
def docs(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The page to write.")] = Path("docs/reference.md"),
) -> None:
    """Write the reference of all settings from their definitions."""
    from tasks.cli.docs import page

    file.write_text(page())
