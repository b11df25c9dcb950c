"""`python -m flashckpt.trainer --config FILE.toml [--section.key value ...]`, alone or under dlrun."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from flashckpt import entry_points
from flashckpt.environment import env
from flashckpt.errors import RESUME_EXIT_CODE, ConfigError, FlashckptError
from flashckpt.plugin import TrainerCommand
from flashckpt.shm.agent_folder import agent_folder
from flashckpt.trainer.config import RunConfig, read_config, to_toml, without_secrets
from flashckpt.trainer.config.command_line import take_flag, take_value
from flashckpt.trainer.parallel.groups import refuse_check, run_of_group
from flashckpt.trainer.train.nonfatal import nonfatal_streams, report_once, terminal_of
from flashckpt.trainer.train.phases import check_layouts, phases_of
from flashckpt.trainer.train.profile_range import Profiled, phase_steps, profile_range

USAGE = """Usage: python -m flashckpt.trainer [--config FILE.toml] [--section.key VALUE ...]

  Train a Llama-like model on real text, in one process or under dlrun:

    python -m flashckpt.trainer --config configs/tiny.toml
    dlrun --nproc-per-node 8 -m flashckpt.trainer --config configs/3d.toml --train.steps 50

  Weights from and to Hugging Face (hub --help):

    python -m flashckpt.trainer hub import HF_FOLDER ROOT
    python -m flashckpt.trainer hub export ROOT HF_FOLDER [--step N] [--dtype bf16]

  Text to tokens, as [[data.sources]] say:

    python -m flashckpt.trainer data prepare --config FILE.toml
    python -m flashckpt.trainer data duplicates --config FILE.toml [--near]

  What a model says, from a checkpoint, a folder, or the memory of a job (generate --help):

    python -m flashckpt.trainer generate SOURCE "Once upon a time" [--max-tokens N] [--temperature T]

  What a run needs, and how long it takes, on so many GPUs, by arithmetic; which layout is best (plan --help):

    python -m flashckpt.trainer plan --config FILE.toml --gpus 64 --gpu h100 [--search] [--measure] [--json]

  What a run would hold per rank, without running it:

    python -m flashckpt.trainer --dry-run --world 64 --config FILE.toml

Options:
  --config FILE.toml     the run; every setting has a default
  --section.key VALUE    override one setting, e.g. --parallel.tp 2
  --check                train 3 steps in this layout and 3 in one process, compare, and end; where
                         transformers is installed, compare the logits with its as well
  --evaluate             score the newest checkpoint of the run, or init.from, without training, and end;
                         --step N (or N.gM) scores that checkpoint of the run; with --checkpoint.root alone
                         model and tokenizer are those of the root, and only sets and probes are scored
  --profile FROM:TO      write a trace and the memory of steps FROM to TO - 1 to log.folder/profile, per rank
  --profile-phases N     measure N steps as they are, and N in which all ranks meet at the end of each phase;
                         print minimum, median and maximum over ranks, and what compute does not hide
  --print-config         print the resolved run as TOML without credentials, and end
  --dry-run --world N    build the run as N ranks that do not exist, print bytes per rank, and end; with
                         --json, --ranks-per-node N (8), and --device-memory GIB, --node-memory GIB to compare with
  --help                 this text

Exit codes: 0 done, 75 stopped on request with state kept (start again to continue), 10 configuration,
  11 layout, 12 data, 13 checkpoint root, 14 shared memory; others: docs/launching.md.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    rest = list(sys.argv[1:] if words is None else words)
    try:
        is_plugged = _is_plugged(rest)
        if not is_plugged and ("--help" in rest or "-h" in rest):
            _say(USAGE)
            return 0
        env.check("trainer")
        if is_plugged:
            return _command(rest)
        return _command(rest) if rest[:1] == ["data"] else _run(rest)
    except FlashckptError as error:
        report_once(error)
        return error.exit_code


def _run(words: list[str]) -> int:
    is_dry = "--dry-run" in words
    take_dry_run = entry_points.load(entry_points.EXTRAS, "dry-run") if is_dry else entry_points.optional("dry-run")
    dry = None if take_dry_run is None else take_dry_run(words)  # refuses its options without it
    show = take_flag(words, "--print-config")
    check_only = take_flag(words, "--check")
    if evaluate_only := take_flag(words, "--evaluate"):
        words += ["--eval.every", "1"]  # [eval] has an effect
    step = take_value(words, "--step") if evaluate_only else None
    asked, phases = take_value(words, "--profile"), take_value(words, "--profile-phases")
    config = read_config(take_value(words, "--config"), words)
    if step is not None and not config.checkpoint.root:
        raise ConfigError("--step names a checkpoint of no run", found=f"--step {step}", expected="checkpoint.root")
    trains = not (check_only or evaluate_only or show or dry is not None)
    profiled = Profiled(steps=profile_range(asked, config.train.steps), phases=phase_steps(phases, config.train.steps))
    if profiled and not trains:
        raise ConfigError(
            "--profile would have no effect: nothing is trained", found=f"--profile {asked or phases}", expected="a run alone",
            state="Nothing was started.",
        )  # fmt: skip
    if config.init.from_ or evaluate_only:
        config = entry_points.load(entry_points.EXTRAS, "hub-model")(config, is_evaluated=evaluate_only, step=step)
    if show:
        _say(to_toml(without_secrets(config)))
        return 0
    config = run_of_group(config)
    if dry is not None:
        code: int = dry(config)
        return code
    _check_inputs(config, evaluate_only=evaluate_only)
    with nonfatal_streams(over_display=trains and terminal_of(config.log.display) is not None):
        logging.basicConfig(level=logging.INFO, format=f"[rank {env.RANK}] %(name)s: %(message)s")
        if evaluate_only:
            return _evaluate(config, step)
        return _check(config) if check_only else _train(config, profiled)


def _check_inputs(config: RunConfig, *, evaluate_only: bool) -> None:
    """Refuse what can be known to be wrong before torch is imported."""
    check_layouts(config, env.WORLD_SIZE)
    if config.train.float8 != "off":
        entry_points.load(entry_points.EXTRAS, "float8").refuse_without_torchao(config)
    if config.data.sources and (config.eval.held_out or not evaluate_only):
        from flashckpt.trainer.data.prepared import check_sources

        check_sources(config)
    if config.eval.sets or config.eval.probes:
        entry_points.load(entry_points.EXTRAS, "scored").check_evaluation(config)
    if config.samples.every:
        read_prompts = entry_points.load(entry_points.EXTRAS, "prompts")
        for phase in phases_of(config):
            read_prompts(phase.config)


def _is_plugged(words: list[str]) -> bool:
    """Return whether the first word is a command of a plug-in, ours or another's."""
    has_name = words[:1] not in ([], ["data"]) and not words[0].startswith("-")
    return has_name and entry_points.find(entry_points.TRAINER, words[0]) is not None


def _command(words: list[str]) -> int:
    command: TrainerCommand = entry_points.load(entry_points.TRAINER, words[0])
    return command(words[1:])


def _train(config: RunConfig, profiled: Profiled) -> int:
    from flashckpt.trainer.train.loop import train

    code = train(config, profiled)
    # Under dlrun an agreed stop is a success of the rank; dlrun itself ends with 75 for all of them.
    return 0 if code == RESUME_EXIT_CODE and agent_folder() is not None else code


def _check(config: RunConfig) -> int:
    refuse_check(config)
    result = entry_points.load(entry_points.EXTRAS, "check")(config)
    if result is not None:
        _say(
            "this layout trains as one process does: within 3 steps losses differ by "
            f"{result.loss:.1e}, gradient norms by {result.norm:.1e}\n"
            + ("" if result.logits is None else f"transformers gives the same logits to {result.logits:.1e}\n")
        )
    return 0


def _evaluate(config: RunConfig, step: str | None) -> int:
    _say(entry_points.load(entry_points.EXTRAS, "evaluate")(config, step))
    return 0


def _say(text: str) -> None:
    if env.RANK == 0:
        sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
