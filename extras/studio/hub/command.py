"""`python -m flashckpt.trainer hub import | export`. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from flashckpt.cli.common import human_bytes, parse_options
from flashckpt.trainer.config.command_line import run
from flashckpt.trainer.hub.transfer import export_folder, import_folder

_ABOUT_IMPORT = """Make a checkpoint of ROOT from a Hugging Face folder (config.json and *.safetensors), types as they are.
A run takes it up with [init] from = "ROOT"; [init] from = "HF_FOLDER" does the same without a copy."""
_ABOUT_EXPORT = """Write the model of a checkpoint as a folder for AutoModelForCausalLM.from_pretrained: weights,
config.json, and the tokenizer that the weights came with (bytes, for a vocabulary of 256)."""


def hub(words: Sequence[str]) -> int:
    """Run `hub WORDS` and return the exit code; errors are raised."""
    code: int = run(group, words)
    return code


@click.group(
    "python -m flashckpt.trainer hub", no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
def group() -> None:
    """Weights from and to Hugging Face folders."""


def _shared(function: Callable[..., int]) -> Callable[..., int]:
    """Add -o KEY=VALUE and --json."""
    option = click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="storage option")
    return option(click.option("--json", "as_json", is_flag=True, help="print what was done as JSON")(function))


@group.command("import", help=_ABOUT_IMPORT, short_help="a folder becomes a checkpoint")
@click.argument("folder", metavar="HF_FOLDER")
@click.argument("root")
@click.option("--step", type=int, default=0, metavar="N", help="step of the new checkpoint (default 0)")
@_shared
def _import(folder: str, root: str, step: int, options: tuple[str, ...], *, as_json: bool) -> int:
    document = import_folder(Path(folder), root, step, parse_options(options))
    text = (
        f"{document['prefix']} of {document['root']}: {document['family']}, {document['tensors']} tensors, "
        f"{human_bytes(document['nbytes'])}"
    )
    return _say(document, text, as_json=as_json)


@group.command("export", help=_ABOUT_EXPORT, short_help="a checkpoint becomes a folder")
@click.argument("root")
@click.argument("folder", metavar="HF_FOLDER")
@click.option("--step", metavar="N", help="which checkpoint, as N or N.gM (default: the newest)")
@click.option("--dtype", metavar="DTYPE", help="cast to bf16, float16 or float32")
@click.option("--tokenizer", default="", metavar="FOLDER", help="copy the tokenizer of this folder")
@click.option("--ema", "average", is_flag=True, help="the average of the weights ([ema] of the run) instead")
@click.option("--force", is_flag=True, help="replace a folder that an export wrote")
@_shared
def export(root: str, folder: str, options: tuple[str, ...], *, as_json: bool, **choices: Any) -> int:
    """Run `hub export`; its help is above."""
    document = export_folder(root, Path(folder), options=parse_options(options), **choices)
    text = (
        f"{document['to']}: {document['family']}, {document['tensors']} tensors, {human_bytes(document['nbytes'])}"
        + ("" if document["has_tokenizer"] else "; no tokenizer is known: --tokenizer FOLDER adds one")
    )
    return _say(document, text, as_json=as_json)


def _say(document: dict[str, Any], text: str, *, as_json: bool) -> int:
    sys.stdout.write((json.dumps(document) if as_json else text) + "\n")
    return 0
