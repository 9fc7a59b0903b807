"""The commands that watch runs: ``rlflow top`` and ``rlflow metrics``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from infra.settings import Settings
from tasks.cli.commands import STACK, Command, app


@app.command(cls=Command, rich_help_panel=STACK)
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Show so many runs; those at work come first.")] = 20,
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two looks.")] = 2.0,
) -> None:
    """Show runs, their progress and rewards, and the load of this machine, until Ctrl-C.

    Only the files of the data folder are read, so it works without servers.

    \b
    rlflow top
    rlflow top --once --rows 100
    """
    from rich.console import Console
    from rich.live import Live

    from infra.load import machine_load
    from tasks.watch.facts import Watch
    from tasks.watch.table import page

    settings = Settings()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    watch, console = Watch(settings), Console()
    if once:
        console.print(page(watch.look(), machine_load(settings.data_dir), rows))
        return
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(page(watch.look(), machine_load(settings.data_dir), rows), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


@app.command(cls=Command, rich_help_panel=STACK)
def metrics(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9464,
    without_login: Annotated[
        bool, typer.Option("--without-login", help="Answer every user of this machine; only on loopback.")
    ] = False,
) -> None:
    """Show runs and the load of this machine to Prometheus at /metrics, until Ctrl-C.

    It wants the login of the local stack. The stack starts it where RLFLOW_METRICS_PORT is set.

    \b
    rlflow metrics
    rlflow metrics --port 9465 --without-login
    """
    import uvicorn

    from tasks.watch.exporter import endpoint

    if without_login and host not in ("127.0.0.1", "localhost", "::1"):
        raise typer.BadParameter(f"--without-login with --host {host}: allowed is loopback (127.0.0.1) alone")
    settings = Settings()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    app = endpoint(settings, login=not without_login)
    typer.echo(f"http://{host}:{port}/metrics", err=True)
    uvicorn.run(app, host=host, port=port, log_level="warning")
