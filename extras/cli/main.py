"""The `flashckpt` command: `main` turns our errors into text (or JSON) and stable exit codes. Torch-free.

Commands are imported when they are called, so that `--help` and `ls` start quickly.
"""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

import click

from flashckpt import __version__, entry_points
from flashckpt.cli import output
from flashckpt.environment import env
from flashckpt.errors import FlashckptError

COMMANDS = {
    "ls": "List the checkpoints of a root, and this machine's snapshots of it.",
    "inspect": "Show tensors, layout, data position and configuration.",
    "verify": "Read every byte and compare it with its digest.",
    "diff": "Compare two checkpoints tensor by tensor.",
    "export": "Write a checkpoint as safetensors, a torch file or a dcp folder.",
    "import": "Make a checkpoint from safetensors, a torch file or a dcp folder.",
    "keep": "Keep a checkpoint whatever the retention policy says.",
    "cp": "Copy a checkpoint to another root, verified on the way.",
    "rm": "Remove one checkpoint.",
    "gc": "Remove garbage: dead jobs' memory, orphans, expired checkpoints.",
    "forget": "Start over: forget what this machine's memory holds of a dead job.",
    "status": "Show the jobs on this machine: last snapshot, last persist, failures.",
    "top": "Follow a job in the terminal.",
    "watch": "Wait until a job commits, reaches a step, or ends.",
    "persist": "Persist the newest snapshot of a running job now.",
    "dashboard": "Show a running or finished job as one page.",
    "doctor": "Check this machine and a root for what would stop a job.",
    "examples": "List example programs and configurations, or write them here.",
    "check": "Run a training script with and without a kill: does it continue exactly?",
    "bench": "Measure memory and storage the way flashckpt uses them.",
    "plan": "Advise on intervals from measured or assumed costs.",
    "train": "Train with the trainer that is part of this package, and what goes with it.",
}
"""The line of the help of each command, which is an entry point. Plug-ins have more."""

INTERNAL_ERROR, SYSTEM_ERROR, INTERRUPTED, CLOSED_PIPE = 70, 74, 130, 141
"""Exit codes as in sysexits.h, and as shells give them for a program that ended by SIGINT or SIGPIPE."""

EPILOG = """\b
Exit codes: 0 done, 1 differences found (diff, check), 2 wrong usage, 10 wrong setting,
13 root unusable, 15 in use, 16 cannot be held, 30 no checkpoint, 31 shards do not
cover the state, 32 damaged, 35 fenced off, 36 newer format, 40 persisting fails,
41 storage failed, 70 an error of flashckpt, 74 refused by the system (a full disk).
"""


class _Lazy(click.Group):
    """A group whose commands are imported when they are looked up; help texts do not import them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS and entry_points.find(entry_points.COMMANDS, cmd_name) is None:
            return None
        command: click.Command = entry_points.load(entry_points.COMMANDS, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command where there is none of that name."""
        is_known = not args or args[0] in COMMANDS or args[0] in _commands()
        if not is_known and (near := difflib.get_close_matches(args[0], _commands(), 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_commands().items()))


def _commands() -> dict[str, str]:
    """Return the line of the help of each command, those of plug-ins behind ours."""
    added = sorted(entry_points.others(entry_points.COMMANDS).items())
    return COMMANDS | {name: f"Added by the package {one.package}." for name, one in added if name not in COMMANDS}


@click.command("flashckpt", cls=_Lazy, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashckpt")
def group() -> None:
    """Inspect, verify and clean up checkpoints and the snapshots in this machine's memory.

    \b
    ROOT is the root of the Checkpointer: a directory, s3://bucket/run, gs://...
    Every command takes --json.  Shell completion: see docs/cli.md.
    """  # noqa: D301 -- click keeps the lines after a backspace character as they are


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code, whatever happens."""
    output.prepare_streams()
    sys.exit(_guarded(sys.argv[1:] if arguments is None else arguments))


def _guarded(arguments: list[str]) -> int:
    """Run the command line; return its exit code; every error is printed in one form."""
    as_json = any(argument == "--json" or argument.startswith("--json=") for argument in arguments)
    try:
        code = _run(arguments)
        output.flush()
    except FlashckptError as error:
        code = error.settle()
        output.print_error(output.error_fields(error), f"{type(error).__name__}: {error}", as_json=as_json)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        code = error.exit_code
        output.print_error(_fields("UsageError", error.format_message(), code), _usage(error), as_json=as_json)
    except (click.Abort, KeyboardInterrupt):
        code, text = INTERRUPTED, "interrupted; changes already made are listed above"
        output.print_error(_fields("Interrupted", text, code), text, as_json=as_json)
    except BrokenPipeError:  # the reader closed the pipe, as in `flashckpt ls ROOT | head -1`
        code = CLOSED_PIPE
        output.silence()
    except Exception as error:  # noqa: BLE001 -- one clear error, also for unforeseen exceptions
        code = _unforeseen(error, as_json=as_json)
    return code


def _run(arguments: list[str]) -> int:
    if "_FLASHCKPT_COMPLETE" in os.environ:
        group.main(arguments, prog_name="flashckpt", standalone_mode=False)
        return 0
    with group.make_context("flashckpt", list(arguments)) as context:  # group.main would turn closed pipes into code 1
        env.check("command")
        code = group.invoke(context)
    return code if isinstance(code, int) else 0


def _unforeseen(error: Exception, *, as_json: bool) -> int:
    """Print an error that no command named; return its exit code."""
    output.print_traceback()
    if isinstance(error, OSError):
        code, problem, remedy = SYSTEM_ERROR, "the system refused an operation", ""
    else:
        code, problem = INTERNAL_ERROR, "an error inside flashckpt; please report it"
        remedy = "FLASHCKPT_TRACEBACK=1 flashckpt ... shows where it comes from"
    found = f"{type(error).__name__}: {error}"
    text = f"{problem}\n  found:    {found}" + (f"\n  to do:    {remedy}" if remedy else "") + f"\n  exit code {code}"
    fields = _fields(type(error).__name__, problem, code) | {"found": found, "remedy": remedy}
    output.print_error(fields, text, as_json=as_json)
    if isinstance(error, OSError):
        output.silence()
    return code


def _fields(kind: str, problem: str, exit_code: int) -> dict[str, Any]:
    parts = dict.fromkeys(("found", "expected", "state", "remedy"), "")
    return {"problem": problem, **parts, "type": kind, "exit_code": exit_code}


def _usage(error: click.ClickException) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":  # since click 8.2: its message is the help text
        return error.format_message()
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\n" if context else ""
    return f"{usage}Error: {error.format_message()}"


if __name__ == "__main__":
    main()
