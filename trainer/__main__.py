"""`python -m flashckpt.trainer --config FILE.toml [--section.key value ...]`, alone or under dlrun."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from flashckpt.errors import RESUME_EXIT_CODE, FlashckptError
from flashckpt.trainer.config import RunConfig, read_config, to_toml, without_secrets
from flashckpt.trainer.dry_run.options import take_options
from flashckpt.trainer.nonfatal import nonfatal_streams
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train.report_once import report_once
from flashckpt.trainer.watch.terminal import terminal_of

USAGE = """Usage: python -m flashckpt.trainer [--config FILE.toml] [--section.key VALUE ...]

  Train a Llama-like model on real text, in one process or under dlrun:

    python -m flashckpt.trainer --config configs/tiny.toml
    dlrun --nproc-per-node 8 -m flashckpt.trainer --config configs/3d.toml --train.steps 50

  Weights from and to Hugging Face (hub --help):

    python -m flashckpt.trainer hub import HF_FOLDER ROOT
    python -m flashckpt.trainer hub export ROOT HF_FOLDER [--step N] [--dtype bf16]

  Text to tokens, as [[data.sources]] say:

    python -m flashckpt.trainer data prepare --config FILE.toml

  What a model says, from a checkpoint, a folder, or the memory of a job (generate --help):

    python -m flashckpt.trainer generate SOURCE "Once upon a time" [--max-tokens N] [--temperature T]

  What a run would hold per rank, without running it:

    python -m flashckpt.trainer --dry-run --world 64 --config FILE.toml

Options:
  --config FILE.toml     the run; every setting has a default
  --section.key VALUE    override one setting, e.g. --parallel.tp 2
  --check                train 3 steps in this layout and 3 in one process, compare, and end; where
                         transformers is installed, compare the logits with its as well
  --evaluate             score the newest checkpoint of the run, or init.from, without training, and end
  --print-config         print the resolved run as TOML without credentials, and end
  --dry-run --world N    build the run as N ranks that do not exist, print bytes per rank, and end; with
                         --json, --ranks-per-node N (8), and --device-memory GIB, --node-memory GIB to compare with
  --help                 this text

Exit codes: 0 done, 75 stopped on request with state kept (start again to continue), 10 configuration,
  11 layout, 12 data, 13 checkpoint root, 14 shared memory; others: docs/trainer.md.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    rest = list(sys.argv[1:] if words is None else words)
    if rest[:1] not in (["generate"], ["hub"]) and ("--help" in rest or "-h" in rest):
        _say(USAGE)
        return 0
    try:
        if rest[:1] == ["hub"]:
            return _hub(rest[1:])
        if rest[:1] == ["generate"]:
            return _generate(rest[1:])
        return _data(rest[1:]) if rest[:1] == ["data"] else _run(rest)
    except FlashckptError as error:
        report_once(error)
        return error.exit_code


def _run(words: list[str]) -> int:
    dry = take_options(words)
    show = _take_flag(words, "--print-config")
    check_only = _take_flag(words, "--check")
    if evaluate_only := _take_flag(words, "--evaluate"):
        words += ["--eval.every", "1"]  # [eval] has an effect
    config = read_config(_take_value(words, "--config"), words)
    if config.init.from_:
        from flashckpt.trainer.hub.start import with_model_of_weights

        config = with_model_of_weights(config)
    if show:
        _say(to_toml(without_secrets(config)))
        return 0
    if dry is not None:
        from flashckpt.trainer.dry_run.command import dry_run

        return dry_run(config, dry)
    resolve_layout(config, int(os.environ.get("WORLD_SIZE", "1")))  # refused before torch is imported
    if config.data.sources and (config.eval.held_out or not evaluate_only):
        from flashckpt.trainer.data.prepared import check_sources

        check_sources(config)
    if config.eval.sets or config.eval.probes:
        from flashckpt.trainer.data.sets import check_evaluation

        check_evaluation(config)
    if config.samples.every:
        from flashckpt.trainer.generate.prompts import read_prompts

        read_prompts(config)
    with nonfatal_streams(
        over_display=not (check_only or evaluate_only) and terminal_of(config.log.display) is not None
    ):
        logging.basicConfig(level=logging.INFO, format=f"[rank {os.environ.get('RANK', '0')}] %(name)s: %(message)s")
        if evaluate_only:
            return _evaluate(config)
        return _check(config) if check_only else _train(config)


def _hub(words: list[str]) -> int:
    from flashckpt.trainer.hub.command import hub

    return hub(words)


def _generate(words: list[str]) -> int:
    from flashckpt.trainer.generate.command import generate

    return generate(words)


def _data(words: list[str]) -> int:
    from flashckpt.trainer.data.command import data

    path = _take_value(words, "--config")
    return data(words, path)


def _train(config: RunConfig) -> int:
    from flashckpt.trainer.train.loop import train

    code = train(config)
    # Under dlrun an agreed stop is a success of the rank; dlrun itself ends with 75 for all of them.
    return 0 if code == RESUME_EXIT_CODE and "FLASHCKPT_AGENT_DIR" in os.environ else code


def _check(config: RunConfig) -> int:
    from flashckpt.trainer.evaluate.check import check

    result = check(config)
    if result is not None:
        _say(
            "this layout trains as one process does: within 3 steps losses differ by "
            f"{result.loss:.1e}, gradient norms by {result.norm:.1e}\n"
            + ("" if result.logits is None else f"transformers gives the same logits to {result.logits:.1e}\n")
        )
    return 0


def _evaluate(config: RunConfig) -> int:
    from flashckpt.trainer.evaluate.command import evaluate
    from flashckpt.trainer.evaluate.results import score_table

    scores, where = evaluate(config)
    _say(f"{where}\n{score_table(scores)}")
    return 0


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def _take_flag(words: list[str], name: str) -> bool:
    if name in words:
        words.remove(name)
        return True
    return False


def _take_value(words: list[str], name: str) -> str | None:
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            del words[i]
            return words.pop(i)
        if word.startswith(f"{name}="):
            return words.pop(i).partition("=")[2]
    return None


if __name__ == "__main__":
    sys.exit(main())
