"""The commands that use a model: ``rlflow serve``, ``rlflow push`` and ``rlflow chat``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.settings import Settings
from tasks.cli.commands import MODELS, Command, app, run_names

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A registered model (NAME@ALIAS, NAME/VERSION), the folder of a merged model, or a run (RUN, RUN:STEP).",
        autocompletion=run_names,
    ),
]


@app.command(
    cls=Command, rich_help_panel=MODELS, context_settings={"allow_extra_args": True, "ignore_unknown_options": False}
)
def serve(
    context: typer.Context,
    model: Model,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients. Default: that of the experiment or the run.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    key_variable: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable with a key that clients must send."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Without the prompt template and system prompt of training.")
    ] = False,
) -> None:
    """Serve a model through vLLM's OpenAI-compatible server, with the limits and prompts of its run, until Ctrl-C.

    Of a run with adapters, the checkpoint is served without a merge. Words after -- go to vLLM's server.

    \b
    rlflow serve grpo-geo3k@champion --port 8000
    rlflow serve RUN --key-variable SERVE_KEY
    """
    from infra.logs import log_to_console
    from tasks.serve import become_server, serve_spec

    log_to_console()
    settings = Settings()
    spec = serve_spec(
        model, settings, name=name, host=host, port=port, key_variable=key_variable, plain=plain, further=context.args
    )
    become_server(spec, settings)


@app.command(cls=Command, rich_help_panel=MODELS)
def push(
    model: Model,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A new folder (./FOLDER), or a repository of the Hugging Face hub.")
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Precision of the weights.")
    ] = "bfloat16",
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
) -> None:
    """Write a model as a Hugging Face folder with a model card, or upload it to the hub.

    \b
    rlflow push grpo-geo3k@champion ./FOLDER
    rlflow push RUN OWNER/NAME --public
    """
    from infra.logs import log_to_console
    from tasks.push import push_model

    log_to_console()
    typer.echo(push_model(model, target, Settings(), dtype=dtype, private=not public))


@app.command(cls=Command, rich_help_panel=MODELS, context_settings={"allow_extra_args": True})
def chat(
    context: typer.Context,
    model: Model,
    question: Annotated[
        str | None, typer.Option(help="Ask this and end. Default: ask what is typed, line by line.")
    ] = None,
    picture: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A picture for each question; may be repeated.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
) -> None:
    """Ask a model in the terminal, with pictures, through the engine, prompts and limits of rlflow serve.

    Each question stands alone, as in training. An empty line or Ctrl-D ends. Words after -- go to vLLM's server.

    \b
    rlflow chat grpo-geo3k@champion --picture figure.png
    rlflow chat RUN --picture figure.png --question 'How many sides?'
    """
    from infra.logs import log_to_console
    from tasks.chat import chatting, open_picture
    from tasks.cli.terminal import ask, show

    log_to_console()
    pictures = picture or []
    opened = [open_picture(path) for path in pictures]  # before minutes of loading
    with chatting(model, Settings(), temperature=temperature, further=context.args) as server:
        for path, image in zip(pictures, opened, strict=True):
            show(path, image)
        for text in ask() if question is None else [question]:
            for piece in server.ask(text, pictures):
                typer.echo(piece, nl=False)
            typer.echo()
