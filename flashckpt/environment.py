"""Every environment variable that the product reads, in one table: name, type, bounds, default, who reads it. Torch-free.

A program calls `env.check` where it starts, which reads all of its variables and refuses a wrong one. A value is looked up
where it is used and never kept: a worker that is forked from the zygote has another environment than its parent.
`python tools/environment.py` writes docs/environment.md from this table.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from flashckpt.errors import ConfigError

STARTS = {
    "dlrun": frozenset({"rank", "trainer", "persister"}),
    "trainer": frozenset({"rank", "persister"}),
    "rank": frozenset({"persister"}),
    "persister": frozenset(),
    "command": frozenset(),
}
"""Each program, and those that it starts or contains: it refuses what they would, since they inherit its environment."""
LEAST_SECRET = 16
"""Fewest characters of a job secret."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL")
_COPIES = ("python", "plain", "avx2", "avx512", "neon", "avx2-near")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
T = TypeVar("T")
D = TypeVar("D")


class WrongPartError(ValueError):
    """Words for a value that is wrong, which give no secret away."""


class Variable(Generic[T]):
    """A row of the table; read as an attribute of `Environment`. Empty counts as unset.

    Args:
        by: Programs that read it, by blanks.
        meaning: A sentence for the page.
        default: Value where it is not set.
        expected: The values that are right, with their unit.
        read: Returns the value of a text; raises LookupError or ValueError where that is wrong.
        is_given: Whether dlrun or another launcher sets it, so that only a program that reads it itself refuses it.
        is_secret: Whether no message may show it.
    """

    def __init__(
        self,
        by: str,
        meaning: str,
        default: T,
        expected: str,
        read: Callable[[str], T],
        *,
        is_given: bool = False,
        is_secret: bool = False,
    ) -> None:
        self.name = ""
        self.by, self.meaning, self.default, self.expected = frozenset(by.split()), meaning, default, expected
        self.is_given, self.is_secret, self._read = is_given, is_secret, read

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the attribute."""
        self.name = name

    def __get__(self, environment: Environment, owner: type) -> T:
        """Return the value.

        Raises:
            ConfigError: It is wrong.
        """
        if not (text := environment.mapping.get(self.name, "")):
            return self.default
        shown = f"{len(text)} characters" if self.is_secret else ascii(text)[:100]
        try:
            return self._read(text)
        except WrongPartError as error:
            shown += f"; {error}"
        except (LookupError, ValueError):
            pass
        raise ConfigError(
            f"invalid {self.name}",
            found=shown,
            expected=self.expected,
            state="Nothing was started.",
            remedy=f"correct the environment variable {self.name}, or unset it",
        )


def _text(by: str, meaning: str, default: str = "", *, kind: str = "text", is_given: bool = False) -> Variable[str]:
    return Variable(by, meaning, default, kind, str, is_given=is_given)


def _matching(
    by: str, meaning: str, pattern: str, expected: str, *, is_secret: bool = False, is_given: bool = False
) -> Variable[str]:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text, re.DOTALL):
            return text
        raise ValueError

    return Variable(by, meaning, "", expected, read, is_secret=is_secret, is_given=is_given)


def _choice(by: str, meaning: str, default: str, choices: tuple[str, ...]) -> Variable[str]:
    def read(text: str) -> str:
        return choices[choices.index(text)]

    return Variable(by, meaning, default, f"{', '.join(choices[:-1])} or {choices[-1]}", read)


def _switch(by: str, meaning: str) -> Variable[bool]:
    return Variable(by, meaning, False, "1 or 0", lambda text: _SWITCH[text.lower()])  # noqa: FBT003 -- the default


def _number(
    by: str,
    meaning: str,
    default: D,
    least: int,
    most: int = 10**9,
    *,
    unit: str = "whole number",
    is_given: bool = False,
) -> Variable[int | D]:
    def read(text: str) -> int | D:
        if least <= (value := int(text)) <= most:
            return value
        raise ValueError

    bounds = f"at least {least}" if most == 10**9 else f"{least} to {most}"
    return Variable(by, meaning, default, f"a {unit}, {bounds}", read, is_given=is_given)


def _seconds(by: str, meaning: str, default: float, least: float = 0.0) -> Variable[float]:
    def read(text: str) -> float:
        if least <= (value := float(text)) < math.inf:  # false for nan
            return value
        raise ValueError

    return Variable(by, meaning, default, f"a number of seconds, at least {least:g}", read)


def _after_commit(text: str) -> list[list[str]]:
    """Return the commands in a text that separates them by semicolons; each says of which checkpoints."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    for number, words in enumerate(found, 1):
        if not words or not (words[0] in ("export", "cp", "keep") or words[:2] == ["hub", "export"]):
            raise WrongPartError(f"command {number} is {ascii(' '.join(words[:1]))[:20]}")
        steps = words[words.index("--every") + 1 :][:1] if "--every" in words else []
        if (is_by_step := bool(steps and int(steps[0]) > 0)) == ("--kept" in words):
            raise WrongPartError(f"command {number}, {words[0]}, has {'both' if is_by_step else 'neither'}")
    return found


class Environment:
    """The variables as attributes. Only `_FLASHCKPT_COMPLETE` and the `PET_*` of dlrun's options are read elsewhere, by click and torch.

    Args:
        mapping: In place of the environment of this process.
    """

    def __init__(self, mapping: Mapping[str, str] = os.environ) -> None:
        self.mapping = mapping

    def is_set(self, name: str) -> bool:
        """Return whether a variable of the table is there, empty or not."""
        return TABLE[name].name in self.mapping

    def check(self, program: str) -> None:
        """Read every variable of a program and of those that it starts (`STARTS`).

        Raises:
            ConfigError: One is wrong.
        """
        for variable in TABLE.values():
            started = frozenset() if variable.is_given else STARTS[program]
            if variable.name in self.mapping and variable.by & {program, *started}:
                getattr(self, variable.name)

    FLASHCKPT_SHM_DIR = _text(
        "dlrun rank persister command",
        "Folder on tmpfs for snapshots in memory; it is made if missing, and must be writable.",
        "/dev/shm",  # noqa: S108 -- tmpfs on purpose
        kind="a folder",
    )
    FLASHCKPT_LOCKED_MB = _number(
        "rank",
        "Most MB that a rank page-locks for its slots; larger ones are filled through four blocks of 16 MiB. Not set: a "
        "quarter of the machine's memory, shared by its ranks.",
        None,
        0,
    )
    FLASHCKPT_JOB_ID = _matching(
        "rank",
        "Name of the job, by which a restart finds its memory; dlrun sets it to `--rdzv-id` where that is given.",
        "[A-Za-z0-9][A-Za-z0-9._-]{0,127}",
        "letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
    )
    FLASHCKPT_JOB_SECRET = _matching(
        "dlrun rank",
        "Secret that the nodes of one job share ([launching.md](launching.md#who-can-reach-a-job)).",
        f".{{{LEAST_SECRET},}}",
        f"at least {LEAST_SECRET} characters",
        is_secret=True,
    )
    FLASHCKPT_JOB_SECRET_FILE = _text("dlrun", "File of mode 0600 with that secret.", kind="a file")
    FLASHCKPT_KEEP_DEAD = _seconds(
        "command", "How long `flashckpt gc` leaves the memory of a job that is dead and resumable.", 24 * 3600.0
    )
    FLASHCKPT_DAEMON_LINGER = _seconds(
        "persister", "How long it stays after the last process of the job, once its work is done.", 30.0
    )
    FLASHCKPT_DAEMON_PATIENCE = _seconds(
        "persister",
        "How long it stays after the last process of the job while storage keeps failing, and after SIGTERM while it persists.",
        600.0,
    )
    FLASHCKPT_DAEMON_GRACE = _seconds("persister", "How long it stays after SIGTERM while storage keeps failing.", 60.0)
    FLASHCKPT_METRICS_PORT = _number(
        "persister",
        "Port of its Prometheus metrics ([cli.md](cli.md#the-daemons-metrics-and-log)), none if not set; 0: any free port.",
        None,
        0,
        65535,
        unit="port number",
    )
    FLASHCKPT_METRICS_HOST = _text("persister", "Address on which it serves them.", "127.0.0.1", kind="an address")
    FLASHCKPT_OTLP_URL = _matching(
        "persister",
        "OpenTelemetry collector that gets the same metrics, `http://host:4318/v1/metrics`.",
        r"https?://.+",
        "a URL",
        is_secret=True,
    )
    FLASHCKPT_HOOK: Variable[list[str]] = Variable(
        "dlrun persister",
        "Command or webhook that gets incidents, bad nodes and commits ([operations.md](operations.md#the-hook)).",
        [],
        "a command as a shell would read it, or a URL of http:// or https://",
        shlex.split,
        is_secret=True,
    )
    FLASHCKPT_AFTER_COMMIT: Variable[list[list[str]]] = Variable(
        "dlrun persister",
        "Exports and copies beside training ([interop.md](interop.md#beside-training)).",
        [],
        "export, cp or hub export, each with --every STEPS or --kept, keep --best with --every, and ; between them",
        _after_commit,
        is_secret=True,
    )
    FLASHCKPT_REPLICA_DOMAIN = _text(
        "rank", "What fails together with this node (a rack, a switch), as dlrun's `--replica-domain`.", kind="a name"
    )
    FLASHCKPT_REPLICA_ADDRESS = _text(
        "rank", "Where it takes replicas in; else the address from which it reaches `MASTER_ADDR`.", kind="an address"
    )
    FLASHCKPT_REPLICA_NICE = _number(
        "persister", "Priority of the threads that send and receive replicas, as of `nice`.", 19, -20, 19
    )
    FLASHCKPT_REPLICA_PATIENCE = _seconds(
        "persister", "How long a node may take or report nothing before it is passed over.", 60.0, 0.1
    )
    FLASHCKPT_COPY = _choice(
        "rank persister command",
        "What copies and digests memory, of those that this machine has; the best one if not set.",
        "",
        _COPIES,
    )
    FLASHCKPT_KERNEL_LOG = _text(
        "dlrun", "The kernel's log, read for the report of an incident.", "/dev/kmsg", kind="a file"
    )
    FLASHCKPT_LOGLEVEL = _choice("dlrun", "Lines of dlrun that are shown.", "INFO", _LOG_LEVELS)
    FLASHCKPT_WAIT_FLUSH = _switch("dlrun", "Exit only when the newest snapshot is persisted, as it does as PID 1.")
    FLASHCKPT_TRACEBACK = _switch("rank command", "Show every frame of an error of flashckpt.")
    FLASHCKPT_CRASH_AT = _text("rank persister", "Crash point of a test (`flashckpt/faults.py`).", kind="a name")
    FLASHCKPT_AGENT_DIR = _text(
        "rank trainer", "Folder of the agent ([launching.md](launching.md#environment-of-a-worker)).", is_given=True
    )
    FLASHCKPT_RESTART = _number(
        "rank trainer", "Generations that the agent started before this one.", 0, 0, is_given=True
    )
    FLASHCKPT_BACK = _number(
        "rank", "How far back a restore goes after the same failure; 0: to the newest state.", 0, 0, is_given=True
    )
    FLASHCKPT_LEAVE_OUT = _matching(
        "rank", "Samples of these steps are left out after a restore.", r"\d+-\d+", "two steps, as 41-43", is_given=True
    )
    FLASHCKPT_RESTORE_STEP = _number("rank", "As dlrun's `--restore-step`.", -1, -1, is_given=True)
    FLASHCKPT_STACKS_FILE = _text("rank", "File for the stacks of its threads where the ranks hang.", is_given=True)

    RANK = _number("rank trainer", "This process among those of the job.", 0, 0, is_given=True)
    WORLD_SIZE = _number("trainer", "Processes of the job.", 1, 1, is_given=True)
    LOCAL_RANK = _number(
        "rank trainer", "This process among those of its agent; -1: there is none.", 0, -1, is_given=True
    )
    LOCAL_WORLD_SIZE = _number("rank trainer", "Processes of its agent.", 1, 1, is_given=True)
    WORKER_NUM = _number("rank", "Most nodes; DLRover sets it.", 0, 0, is_given=True)
    MASTER_ADDR = _text("rank", "Towards it the address of this node is looked up.", kind="an address", is_given=True)
    TORCHELASTIC_RUN_ID = _text("trainer", "Name of the launch in `restores.jsonl`.", is_given=True)
    TORCHELASTIC_ERROR_FILE = _text("dlrun rank", "File for the first error.", kind="a file", is_given=True)
    TORCHELASTIC_SIGNALS_TO_HANDLE = _text(
        "dlrun", "Signals that ask for a stop; torch sets it.", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", is_given=True
    )
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT = _seconds("dlrun", "`--shutdown-timeout` before torch 2.12.", 0.0)
    PYTHON_EXEC = _text("dlrun", "Another interpreter for the workers: they are not forked.", kind="a program")
    PYTHONPATH = _text("rank", "Its persister gets it, with the folder of flashckpt before.", kind="folders")
    OMP_NUM_THREADS = _text("rank", "Threads of torch in a forked worker; its cores if not set.")
    GLOO_SOCKET_IFNAME = _text("dlrun", "Interface of gloo; on one node `lo` if not set.")
    NCCL_SOCKET_IFNAME = _text("dlrun", "Interface of NCCL; on one node `lo` if not set.")
    SLURM_JOB_ID = _text("rank", "Names the job, with its root, where nothing else does.")
    JOBSET_UID = _text("rank", "The same, of a Kubernetes JobSet.")
    JOB_UID = _text("rank", "The same, of a Kubernetes Job.")
    SLURM_TOPOLOGY_ADDR = _text(
        "rank", "Its switches are the failure domain where `FLASHCKPT_REPLICA_DOMAIN` is not set."
    )
    SLURM_TOPOLOGY_ADDR_PATTERN = _text("rank", "Says which parts of that are switches.")
    AWS_ENDPOINT_URL_S3 = _text(
        "rank persister command", "S3 endpoint; botocore reads it and all others of AWS.", kind="a URL"
    )
    CI = _text("trainer", "Where set, the trainer draws no live display.")
    NO_COLOR = _text("trainer", "The same.")
    TERM = _text("trainer", "The same where it is `dumb`.", "dumb")


TABLE: dict[str, Variable[object]] = {name: row for name, row in vars(Environment).items() if isinstance(row, Variable)}
"""Every variable by its name."""
env = Environment()
"""The environment of this process."""
