"""`flashckpt train`: what `python -m flashckpt.trainer` does, each part as a command that a shell completes. Torch-free until one runs."""

from __future__ import annotations

import click

PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "run": ((), "Train: --config FILE.toml [--section.key VALUE ...]."),
    "check": (("--check",), "Compare 3 steps in this layout with 3 in one process."),
    "evaluate": (("--evaluate",), "Score the newest checkpoint, or --step N, and end."),
    "config": (("--print-config",), "Print the resolved run as TOML without credentials."),
    "dry-run": (("--dry-run",), "What --world N ranks would hold, without running them."),
    "data": (("data",), "Text to tokens: prepare --config FILE.toml."),
    "hub": (("hub",), "Weights from and to Hugging Face folders: import, export."),
    "generate": (("generate",), "Say what a model says: SOURCE PROMPT."),
    "plan": (("plan",), "Layouts and times by arithmetic: --gpus 64 --gpu h100."),
}
"""Words of the trainer's command line for each part, and its line of the help."""


def _part(name: str) -> click.Command:
    words, text = PARTS[name]

    def call(rest: tuple[str, ...]) -> int:
        from flashckpt.trainer.__main__ import main

        return main([*words, *rest])

    settings = {"ignore_unknown_options": True, "help_option_names": []}
    rest = click.Argument(["rest"], nargs=-1, type=click.Path())  # so that shells complete the names of files
    return click.Command(name, context_settings=settings, callback=call, params=[rest], help=text)


train = click.Group(
    "train",
    commands=[_part(name) for name in PARTS],
    help="""Train a transformer in three dimensions of parallelism, and what goes with it.

    The same as python -m flashckpt.trainer, which dlrun starts on several ranks. --help behind a command is its own;
    with --json where it has one.

    \b
    Examples:
      flashckpt train run --config configs/tiny.toml
      flashckpt train dry-run --world 64 --config configs/3d.toml
      dlrun --nproc-per-node 8 -m flashckpt.trainer --config configs/3d.toml
    """,
)
"""The command."""
