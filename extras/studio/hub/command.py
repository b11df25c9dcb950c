"""`python -m flashckpt.trainer hub import | export`. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashckpt.cli.common import human_bytes, parse_options
from flashckpt.trainer.config.command_line import CommandParser
from flashckpt.trainer.hub.transfer import export_folder, import_folder

_ABOUT_IMPORT = """Make a checkpoint of ROOT from a Hugging Face folder (config.json and *.safetensors), types as they are.
A run takes it up with [init] from = "ROOT"; [init] from = "HF_FOLDER" does the same without a copy."""
_ABOUT_EXPORT = """Write the model of a checkpoint as a folder for AutoModelForCausalLM.from_pretrained: weights,
config.json, and the tokenizer that the weights came with (bytes, for a vocabulary of 256)."""


def hub(words: Sequence[str]) -> int:
    """Run `hub WORDS` and return the exit code; errors are raised."""
    try:
        given = parse(words)
    except SystemExit:  # --help has printed its text
        return 0
    options = parse_options(tuple(given.options))
    if given.command == "import":
        document = import_folder(Path(given.folder), given.root, given.step, options)
        text = (
            f"{document['prefix']} of {document['root']}: {document['family']}, {document['tensors']} tensors, "
            f"{human_bytes(document['nbytes'])}"
        )
    else:
        document = export_folder(
            given.root,
            Path(given.folder),
            step=given.step,
            dtype=given.dtype,
            tokenizer=given.tokenizer,
            force=given.force,
            average=given.ema,
            options=options,
        )
        text = (
            f"{document['to']}: {document['family']}, {document['tensors']} tensors, {human_bytes(document['nbytes'])}"
            + ("" if document["has_tokenizer"] else "; no tokenizer is known: --tokenizer FOLDER adds one")
        )
    _say(document, text, as_json=given.json)
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return what a command line says; ConfigError where it is wrong, SystemExit after --help."""
    return _parser().parse_args(list(words))


def _say(document: dict[str, Any], text: str, *, as_json: bool) -> None:
    sys.stdout.write((json.dumps(document) if as_json else text) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m flashckpt.trainer hub", description="Weights from and to Hugging Face folders."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export")
    shared: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    one = commands.add_parser("import", help="a folder becomes a checkpoint", description=_ABOUT_IMPORT, **shared)
    one.add_argument("folder", metavar="HF_FOLDER")
    one.add_argument("root", metavar="ROOT")
    one.add_argument("--step", type=int, default=0, metavar="N", help="step of the new checkpoint (default 0)")
    other = commands.add_parser("export", help="a checkpoint becomes a folder", description=_ABOUT_EXPORT, **shared)
    other.add_argument("root", metavar="ROOT")
    other.add_argument("folder", metavar="HF_FOLDER")
    other.add_argument("--step", metavar="N", help="which checkpoint, as N or N.gM (default: the newest)")
    other.add_argument("--dtype", metavar="DTYPE", help="cast to bf16, float16 or float32")
    other.add_argument("--tokenizer", default="", metavar="FOLDER", help="copy the tokenizer of this folder")
    other.add_argument("--ema", action="store_true", help="the average of the weights ([ema] of the run) instead")
    other.add_argument("--force", action="store_true", help="replace a folder that an export wrote")
    for command in (one, other):
        command.add_argument(
            "-o", dest="options", action="append", default=[], metavar="KEY=VALUE", help="storage option"
        )
        command.add_argument("--json", action="store_true", help="print what was done as JSON")
    return parser
