"""`flashckpt dashboard`: serves the page, or writes it to a file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import IO, Any

import click

from flashckpt.cli.common import Command, complete_source, json_option
from flashckpt.dashboard.gather import PageSource
from flashckpt.dashboard.server import Dashboard, render
from flashckpt.errors import ConfigError
from flashckpt.printable import to_json


@click.command(cls=Command)
@click.argument("source", metavar="ROOT|JOB", shell_complete=complete_source)
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option of ROOT.")
@click.option("--plan", "plan", type=click.File(encoding="utf-8"), help="JSON of `flashckpt plan`, to show beside it.")
@click.option("--export", "target", type=click.Path(path_type=Path, dir_okay=False), help="Write the page as one file.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port  [default: any free one]")
@json_option
def dashboard(
    source: str,
    options: tuple[str, ...],
    *,
    plan: IO[str] | None,
    target: Path | None,
    host: str,
    port: int,
    as_json: bool,
) -> None:
    """Show a running or finished job as one page: curves, sessions, restarts, checkpoints, ranks.

    The printed address has a token and answers nobody without it. It is not encrypted: on another address than loopback,
    whoever listens on the way can read it (an SSH tunnel does better). --json prints what the page shows.

    Examples:
      flashckpt dashboard s3://bucket/run7
      flashckpt dashboard /checkpoints/run7 --export run7.html
    """
    found = PageSource(source, options, _planned(plan) if plan is not None else None)
    if as_json:
        click.echo(to_json(found.document()))
        return
    if target is not None:
        with target.open("w", encoding="utf-8") as file:
            file.write(render(found.document()))
        click.echo(f"{target}: open it in any browser, no network needed")
        return
    try:
        server = Dashboard(found.document, host, port)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be served on {host}:{port}",
            found=str(error),
            remedy="another --port, or 0 for a free one",
        ) from error
    click.echo(f"{server.url}\nCtrl-C ends it; the job does not notice")
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def _planned(file: IO[str]) -> dict[str, Any]:
    """Return the forecast of a plan. ConfigError: The file holds none."""
    try:
        found = json.load(file)
        return {name: {key: float(value) for key, value in found[name].items() if type(value) in (int, float)}
                for name in ("intervals", "costs")} | {"mtbf_s": float(found["mtbf_s"])}  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            "--plan names no plan",
            found=f"{file.name}: {type(error).__name__}",
            remedy="flashckpt plan ... --json FILE",
        ) from error
