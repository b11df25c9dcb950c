"""`dlrun`: torchrun with a restart of tenths of a second. Also `python -m flashckpt.daemon.run`.

Accepts every torchrun flag in both spellings and every PET_* variable, and a few more options. The
order of the start is the point: torch is imported once, with one thread; the zygote is forked from
this process before anything else has started, and imports the rest while the agent rendezvous.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashckpt import entry_points
from flashckpt.daemon.launcher.budget import ESCALATE, REFILL_STEPS, RESTARTS
from flashckpt.daemon.launcher.options import CommandError
from flashckpt.daemon.machine.process import hide_variable
from flashckpt.daemon.zygote import server
from flashckpt.daemon.zygote.rehearse import check_target
from flashckpt.environment import env
from flashckpt.errors import RESUME_EXIT_CODE, ConfigError, FlashckptError
from flashckpt.nonfatal import fill_closed, log_stream, report_lost
from flashckpt.report import PrintableFormatter

if TYPE_CHECKING:
    from flashckpt.daemon.launcher.options import LaunchOutcome
    from flashckpt.daemon.zygote.client import ZygoteClient

_log = logging.getLogger("flashckpt.dlrun")
_OWN = "dlrun"
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("no-zygote", False, "Start every worker as a new interpreter (seconds per restart) instead of forking it."),
    ("grace-timeout", 60.0, "Seconds an agreed stop (SIGTERM, SIGINT) may take before the workers are killed."),
    ("ledger", "", "File that gets one JSON line per failure: where the seconds of the restart went."),
    (
        "wait-flush",
        False,
        "After a failure or a stop, exit only when the newest snapshot is persisted (always on as PID 1).",
    ),
    (
        "node-check",
        False,
        "Before the first generation, find bad and slow nodes (matrix product, pairwise exchange) and exclude them.",
    ),
    (
        "node-unit",
        1,
        "Run on multiples of this many nodes (c10d rendezvous); surplus nodes wait for more to join.",
    ),
    (
        "replica-domain",
        "",
        "Name of what fails together with this node (a rack, a switch): replicas go to nodes with another name.",
    ),
    (
        "hang-timeout",
        None,
        "Seconds without a step that count as a hang; 0: never. Default: 20 median steps, at least 60 s.",
    ),
    (
        "refill-steps",
        REFILL_STEPS,
        "New steps between two failures that refill --max-restarts; 0: never, as in torchrun.",
    ),
    (
        "escalate",
        ESCALATE,
        "How often the same failure at one step restarts from one state further back; 0: it ends the job.",
    ),
    (
        "restore-step",
        -1,
        "Step to go back to at the first start, in memory or on the root: what is newer is abandoned. -1: the newest state.",
    ),
    (
        "warm",
        "",
        "MODULE:FUNCTION that rehearses a step in the process that forks restarted workers; none: no rehearsal.",
    ),
    (
        "standby",
        0,
        "Spare processes per node that make a context of their device ahead of a restart (0.5 GB of its memory each).",
    ),
)
"""dlrun's own options: name, default (False: a switch; None: learnt from the run), help. Each is also PET_<NAME>."""


def get_args_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with dlrun's own options added."""
    with server.single_threaded_imports():
        from torch.distributed import run as torchrun
        from torch.distributed.argparse_util import check_env, env
    parser = torchrun.get_args_parser()
    if "PET_MASTER_PORT" not in os.environ:  # torch 2.11 has 29500 here, and with it the static rendezvous
        parser.set_defaults(master_port=None)
    if "PET_SIGNALS_TO_HANDLE" not in os.environ:  # Slurm's --signal=USR1@90 asks for a stop as well
        parser.set_defaults(signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    parser.prog = _OWN
    parser.description = "Launch and keep alive a distributed PyTorch job (every torchrun option, and dlrun's own)"
    _restart_by_default(parser)
    own = parser.add_argument_group(_OWN)
    for name, default, text in OPTIONS:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        if default is False:
            own.add_argument(*spellings, action=check_env, help=text)
        else:
            own.add_argument(
                *spellings, action=env, type=float if default is None else type(default), default=default, help=text
            )
    return parser


def _restart_by_default(parser: argparse.ArgumentParser) -> None:
    """Let --max-restarts be None where it is not given (torchrun's default of 0 never restarts), and say so in --help."""
    (action,) = (action for action in parser._actions if action.dest == "max_restarts")  # noqa: SLF001 -- argparse has no other way
    if "PET_MAX_RESTARTS" not in os.environ:
        action.default = None
    action.help = (
        f"Restarts without progress before the job ends; 0: never restart. Default: {RESTARTS}, which"
        f" {REFILL_STEPS} new steps (or 10 minutes of running, in scripts without a Checkpointer) refill."
        " The same error at the same step twice ends the job at once."
    )


def config_from_args(args: argparse.Namespace) -> Any:
    """Return torchrun's launch configuration, command and its arguments for these settings."""
    from torch.distributed import run as torchrun

    given = args.max_restarts is not None
    return torchrun.config_from_args(args if given else argparse.Namespace(**{**vars(args), "max_restarts": RESTARTS}))


def parse_args(args: list[str] | None) -> argparse.Namespace:
    """Parse a command line (default: sys.argv)."""
    return get_args_parser().parse_args(args)


def run(args: argparse.Namespace) -> dict[int, Any]:
    """Run the job of these settings, in the place of torch.distributed.run.run; they may be of torchrun's own parser.

    Returns:
        What each rank of this node returned, where it runs a function.

    Raises:
        SystemExit: The job was stopped on request and its state is kept (75).
        ChildFailedError: Ranks failed and no restart was left.
    """
    if any(name.replace("-", "_") not in args for name, _, _ in OPTIONS):
        args = argparse.Namespace(**{**vars(parse_args(["-"])), **vars(args)})
    return launched(args).returned_or_exit()


def launched(args: argparse.Namespace, zygote: ZygoteClient | None = None) -> LaunchOutcome:
    """Run the job of these settings; say how it ended."""
    from flashckpt.daemon.launcher.launch import launch
    from flashckpt.daemon.launcher.options import AgentOptions
    from flashckpt.daemon.zygote.client import ZygoteClient

    entry_points.refuse_wrong_tasks()
    _refuse_negative(args)
    named = _fill_rendezvous(args)
    if args.replica_domain:
        os.environ["FLASHCKPT_REPLICA_DOMAIN"] = args.replica_domain  # the workers inherit it
    args.rdzv_conf = _quicker(args)
    config, command, command_args = config_from_args(args)
    timeout = getattr(args, "shutdown_timeout", None)  # an option of torchrun since 2.12
    if timeout is None:
        timeout = env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT
    options = AgentOptions(
        job=args.rdzv_id if named else "",
        restarts_chosen=args.max_restarts is not None,
        endpoint=config.rdzv_endpoint,
        survivors_s=timeout,
        grace_s=args.grace_timeout,
        ledger=args.ledger,
        log_dir=args.log_dir or "",
        hang_s=args.hang_timeout,
        refill_steps=args.refill_steps,
        escalate=args.escalate,
        restore_step=args.restore_step,
        wait_flush=args.wait_flush or os.getpid() == 1,
        node_check=args.node_check,
        min_nodes=config.min_nodes,
        node_unit=_node_unit(args, config.min_nodes, config.max_nodes),
        warm=check_target(args.warm),
        standbys=_standbys(args),
    )
    if args.restore_step >= 0:
        _log.warning(
            "--restore-step %d: what is newer is abandoned; the next launch is to go without", args.restore_step
        )
    zygote = zygote or ZygoteClient(disabled=_unfit_command(args))
    zygote.prepare()
    outcome = launch(config, command, command_args, zygote=zygote, options=options)
    if (
        not args.log_dir and config.logs_specs is not None
    ):  # torch made a temporary one; after a failure its error files are worth reading
        shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)
    return outcome


def _fill_rendezvous(args: argparse.Namespace) -> bool:
    """Choose the rendezvous as torchrun does; return whether the user named the job by --rdzv-id."""
    from torch.distributed import run as torchrun

    named = args.rdzv_id not in ("", "none")
    alone = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    implicit = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None and alone
    if args.standalone or implicit:
        named = named and not args.standalone
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = args.rdzv_id if named else str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    return named


def _node_unit(args: argparse.Namespace, min_nodes: int, max_nodes: int) -> int:
    """Return --node-unit.

    Raises:
        ConfigError: --nnodes are no multiples of it.
    """
    unit = int(args.node_unit)
    if unit < 1 or min_nodes % unit or max_nodes % unit:
        raise ConfigError(
            "--nnodes does not fit --node-unit",
            found=f"--nnodes={args.nnodes}, --node-unit={unit}",
            expected=f"a minimum and a maximum that are multiples of {max(1, unit)}",
        )
    return unit


def _standbys(args: argparse.Namespace) -> int:
    """Return --standby; one line says that there will be some.

    Raises:
        ConfigError: It is negative, or does not go with another option.
    """
    count, against = int(args.standby), _unfit_command(args) or (args.warm and f"--warm={args.warm}")
    if count < 0 or (count and against):
        raise ConfigError(
            "--standby cannot be used",
            found=f"--standby={count}" + (f", {against}" if against else ""),
            expected="a number from 0 on, ranks that dlrun forks, and no --warm: a process with a context is not forked",
            state="Nothing was started.",
        )
    if count:
        _log.info("once the ranks train, up to %d standby processes make their contexts for the next restart", count)
    return count


def _quicker(args: argparse.Namespace) -> str:
    """Return --rdzv-conf with waits that fit restarts of tenths of a second, where the user set none.

    torch waits 30 s for more nodes than the minimum, and 15 s until a silent one counts as dead. Here a node that
    joins later is included by another restart, and one whose machine does not answer is lost sooner (silence).
    """
    if args.rdzv_backend != "c10d":
        return str(args.rdzv_conf)
    given = {pair.partition("=")[0].strip() for pair in args.rdzv_conf.split(",")}
    ours = {"last_call_timeout": 2, "keep_alive_interval": 2, "keep_alive_max_attempt": 3}
    pairs = [f"{name}={value}" for name, value in ours.items() if name not in given]
    return ",".join([*filter(None, [args.rdzv_conf]), *pairs])


def _unfit_command(args: argparse.Namespace) -> str:
    """Return why this command line cannot be forked from a zygote, or ""."""
    if args.no_zygote:
        return "--no-zygote"
    if args.no_python and not args.run_path:
        return "--no-python: the command is not a Python script"
    interpreter = env.PYTHON_EXEC or sys.executable
    if interpreter != sys.executable and not args.run_path:
        return f"PYTHON_EXEC names another interpreter ({interpreter})"
    return ""


def _refuse_negative(args: argparse.Namespace) -> None:
    """Refuse counts below 0: one would be taken for "never", or for "always".

    Raises:
        ConfigError: There is one.
    """
    for name in ("max_restarts", "refill_steps", "escalate"):
        if (count := getattr(args, name)) is not None and count < 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be negative",
                found=str(count),
                expected="a number from 0 on",
                state="Nothing was started.",
            )


def _refuse_missing(args: argparse.Namespace) -> None:
    """Refuse a command that is not there, before anything is started: every restart would miss it again.

    Raises:
        CommandError: There is no such script, module (its first part: looking further would import it) or program.
    """
    name = str(args.training_script)
    if args.no_python and not args.run_path:
        found, what = shutil.which(name) is not None, "program"
    elif args.module and not args.run_path:
        found, what = _has_module(name.partition(".")[0]) or env.is_set("PYTHON_EXEC"), "module"
    else:
        found, what = os.path.exists(name), "script"  # noqa: PTH110 -- "" is no path, and Path("") is the folder
    if not found:
        raise CommandError.missing(what, name)


def _has_module(name: str) -> bool:
    sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks first
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules
    finally:
        del sys.path[0]


def main(args: list[str] | None = None) -> int:
    """Run dlrun; returns its exit code (docs/launching.md lists them).

    With an explicit `args` (tests, embedding) errors of the workers are raised as torchrun raises
    them, an agreed stop as SystemExit(75), and the zygote is a spawned process; as a program it is forked from this process.
    """
    if args is not None:
        env.check(_OWN)
        run(parse_args(args))
        return 0
    fill_closed()
    # before the zygote is forked: its environment, and that of the ranks, would show it
    hide_variable("FLASHCKPT_JOB_SECRET")
    set_up_log()
    try:
        parsed = parse_args(None)
        env.check(_OWN)
        _log.setLevel(env.FLASHCKPT_LOGLEVEL)
        _refuse_missing(parsed)
        zygote = _fork_zygote(parsed)
    except FlashckptError as error:
        return fail(error)
    if isinstance(zygote, dict):  # this process is a worker now; only this frame of dlrun remains on its stack
        from flashckpt.daemon.zygote.worker import run_worker

        return run_worker(zygote)
    code = _run_program(parsed, zygote)
    atexit._run_exitfuncs()  # noqa: SLF001 -- at once: tearing down torch module by module takes half a second
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # full, or its reader has gone: the exit code counts
            stream.flush()
    _report_lost_lines()
    os._exit(code)


def _fork_zygote(parsed: argparse.Namespace) -> ZygoteClient | dict[str, Any]:
    from flashckpt.daemon.zygote.client import ZygoteClient

    reason = _unfit_command(parsed)
    if not reason and not server.unfit():
        workers, cores = str(parsed.nproc_per_node), len(os.sched_getaffinity(0))
        # a core for each worker's own imports, and one beside it for the zygote's
        return ZygoteClient.forked(is_brief=workers.isdigit() and 2 * int(workers) <= cores)
    if reason:
        _log.info("workers are started as new interpreters: %s", reason)
    return ZygoteClient(disabled=reason)


def _run_program(parsed: argparse.Namespace, zygote: ZygoteClient) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    try:
        # @record copies the first error file to the launcher's own, for schedulers that ask for one
        start = record(launched) if env.TORCHELASTIC_ERROR_FILE else launched
        outcome = start(parsed, zygote)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        _log.error("the job failed: rank %d ended with %d", rank, first.exitcode)
        return 1
    except SignalException as error:
        _log.error("stopped by %s", signal.Signals(error.sigval).name)
        return 128 + int(error.sigval)
    except FlashckptError as error:
        return fail(error)
    return RESUME_EXIT_CODE if outcome is not None and outcome.resume else 0


def fail(error: FlashckptError) -> int:
    """Show an error; return its exit code."""
    code = error.settle()
    _log.error("%s: %s", type(error).__name__, error)
    return code


def set_up_log() -> None:
    """Show what dlrun says, on standard error."""
    handler = logging.StreamHandler(log_stream("[dlrun] "))
    handler.setFormatter(PrintableFormatter("[dlrun] %(message)s"))
    _log.addHandler(handler)
    _log.setLevel("INFO")
    _log.propagate = False


def _report_lost_lines() -> None:
    for handler in _log.handlers:
        report_lost(getattr(handler, "stream", None))


def __getattr__(name: str) -> Any:
    """Offer the rest of torch.distributed.run's names, for code that imports them from its launcher."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "elastic_launch":
        from flashckpt.daemon.launcher.launch import elastic_launch

        return elastic_launch
    from torch.distributed import run as torchrun

    return getattr(torchrun, name)


if __name__ == "__main__":
    sys.exit(main())
