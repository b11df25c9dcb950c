"""The `flashckpt` command: `main` turns our errors into text (or JSON) and stable exit codes. Torch-free.

Commands are imported when they are called, so that `--help` and `ls` start quickly.
"""

from __future__ import annotations

import difflib
import json
import sys
from importlib import import_module
from typing import Any

import click

from flashckpt import __version__
from flashckpt.errors import FlashckptError

COMMANDS: dict[str, tuple[str, str]] = {
    "ls": ("flashckpt.cli.ls:ls", "List the checkpoints of a root, and this machine's snapshots of it."),
    "inspect": ("flashckpt.cli.inspect:inspect", "Show tensors, layout, data position and configuration."),
    "verify": ("flashckpt.cli.verify:verify", "Read every byte and compare it with its digest."),
    "diff": ("flashckpt.cli.diff:diff", "Compare two checkpoints tensor by tensor."),
    "export": ("flashckpt.cli.export:export", "Write a checkpoint as safetensors, a torch file or a dcp folder."),
    "import": ("flashckpt.cli.import_:import_", "Make a checkpoint from safetensors, a torch file or a dcp folder."),
    "keep": ("flashckpt.cli.keep:keep", "Keep a checkpoint whatever the retention policy says."),
    "gc": ("flashckpt.cli.gc:gc", "Remove what nobody needs: dead jobs' memory, orphans, expired checkpoints."),
    "forget": ("flashckpt.cli.forget:forget", "Begin anew: forget what this machine's memory holds of a dead job."),
    "status": ("flashckpt.cli.status:status", "Show the jobs on this machine: last snapshot, last persist, failures."),
    "bench": ("flashckpt.cli.bench:bench", "Measure memory and storage the way flashckpt uses them."),
    "plan": ("flashckpt.cli.plan:plan", "Advise on intervals from measured or assumed costs."),
}

EPILOG = """\b
Exit codes: 0 done, 1 differences found (diff), 2 wrong usage, 10 wrong setting,
13 root unusable, 15 in use, 16 cannot be held, 30 no checkpoint, 31 shards do not
cover the state, 32 damaged, 35 fenced off, 36 newer format, 40 persisting fails,
41 storage failed.
"""


class _Lazy(click.Group):
    """A group whose commands are imported when they are looked up; help texts do not import them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command where there is none of that name."""
        if args and args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command("flashckpt", cls=_Lazy, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashckpt")
def group() -> None:
    """Look at, check and clean up checkpoints and the snapshots in this machine's memory.

    \b
    ROOT is what Checkpointer was given: a directory, s3://bucket/run, gs://...
    Every command takes --json.  Shell completion: see docs/cli.md.
    """  # noqa: D301 -- click keeps the lines after a backspace character as they are


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = group.main(arguments, prog_name="flashckpt", standalone_mode=False)
    except FlashckptError as error:
        _say(error, as_json="--json" in arguments)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        if "--json" in arguments:
            fields = {"type": "UsageError", "problem": error.format_message(), "exit_code": error.exit_code}
            click.echo(json.dumps({"error": fields}))
        else:
            error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: nothing was changed that is not listed above", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _say(error: FlashckptError, *, as_json: bool) -> None:
    if not as_json:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        return
    fields: dict[str, Any] = {
        name: getattr(error, name) for name in ("problem", "found", "expected", "state", "remedy")
    }
    fields |= {"type": type(error).__name__, "exit_code": error.exit_code}
    click.echo(json.dumps({"error": fields}))


if __name__ == "__main__":
    main()
