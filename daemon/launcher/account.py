"""The account of one agent: what it saw when a generation ended, which the first agent judges. Pure.

Accounts go through the round's store as JSON, which anybody who can reach it may write: they are checked field by field, cut to
lengths, and stripped of control characters before they are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashckpt.core.records import pack, unpack

FAILED, HANG, LEFT, PERSISTER = "failed", "hang", "left", "persister"
"""`kind` of an account: a rank ended, ranks made no progress, other nodes waited, the persister cannot write."""
COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "broadcast",
        "broadcast_object_list",
        "barrier",
        "monitored_barrier",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "batch_isend_irecv",
    ]
)
START, BACKWARD, DEVICE, LOST, TIMEOUT, ENDING, STOPPED, DISK = (
    "init_process_group",
    "backward",
    "waiting for the device",
    "losing the connection",
    "a collective that timed out",
    "ending after an error",
    "stopped (SIGSTOP)",
    "uninterruptible sleep (disk or file server)",
)
LOADING, RESTORING, STORAGE, IMPORTING = "data loading", "restoring", "storage", "importing"
NO_CODE = "no Python code"
"""Doing of a rank that gave no stack: it is in a library, busy, or ending."""
WAITS = COLLECTIVES | {START, BACKWARD, DEVICE, LOST, TIMEOUT, ENDING}
"""Doings of a rank that only waits for the others, or has lost them."""
MOST_BYTES = 60_000
_MOST_TEXT, _MOST_TRACE, _MOST_FRAMES, _MOST_RANKS = 300, 3000, 12, 64
_PLACES = (
    (re.compile(r"^(_exitfunc|_run_exitfuncs|_shutdown|excepthook) \(|\(.*/(traceback|linecache|atexit)\.py:"), ENDING),
    (re.compile(r"^(_report|_write_error|write_error) \(.*/zygote/worker\.py"), ENDING),
    (
        re.compile(r"^(init_process_group|new_group|_create_c10d_store|_store_based_barrier) \(.*/torch/distributed/"),
        START,
    ),
    (re.compile(r"\(.*/torch/utils/data/|^default_collate"), LOADING),
    (re.compile(r"\(.*/(flashckpt/)?(sampler|trainer/data)/\w+"), LOADING),
    (re.compile(r"\(.*/flashckpt/storage/"), STORAGE),
    (re.compile(r"\(.*/flashckpt/(restore|checkpoint)/"), RESTORING),
    (re.compile(r"^_engine_run_backward \("), BACKWARD),
    (re.compile(r"^synchronize \(.*/torch/"), DEVICE),
    (re.compile(r"<frozen importlib"), IMPORTING),
)
_LIBRARY = re.compile(r"/site-packages/|/lib/python3|<frozen")
_COLLECTIVE = re.compile(r"^(\w+) \(.*/torch/distributed/")
_NO_ROOM = {"stack": ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAccount:
    """One rank as its agent saw it last.

    Attributes:
        rank, pid, step: The rank; `step` is the last one done, -1 for none.
        phase, phase_s: `start`, `restore`, `first step`, `training`, `paused`, `ended`, and the seconds since its last sign in it.
        code: How it ended (negative: by a signal); None where it still ran.
        error: Last line of its error; "" without one.
        trace: End of its traceback, or of its log.
        is_echo: Whether it only lost a connection, or a collective of it timed out.
        doing: By its stack, in words; "" where that is not known.
        stack: Frames, the innermost first.
    """

    rank: int
    pid: int = 0
    step: int = field(default=-1, metadata={"least": -1})
    phase: str = ""
    phase_s: float = 0.0
    code: int | None = field(default=None, metadata={"least": -255})
    error: str = ""
    trace: str = ""
    is_echo: bool = False
    doing: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAccount:
    """The report of one node's agent about an incident.

    Attributes:
        node, host: Its number in the round, and its name.
        kind: FAILED, HANG, LEFT or PERSISTER.
        at_s: When its first rank failed, unix seconds; when it saw the incident, where none did.
        first: Rank that it blames; -1 for none.
        what: Its end in words.
        ranks: `RankAccount`s as maps.
        kernel, devices: New lines of the kernel's log that matter; what is wrong with its links and devices.
        persister: The problem of its persister; "" for nothing.
        facts: Versions and variables, to find a node that differs.
        decision: Why, or why not.
    """

    node: int
    host: str
    kind: str
    at_s: float
    first: int = field(default=-1, metadata={"least": -1})
    what: str = ""
    ranks: tuple[dict[str, Any], ...] = ()
    kernel: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    persister: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    restarts: bool = True
    decision: str = ""

    def every(self) -> list[RankAccount]:
        """Return its ranks."""
        return [RankAccount(**one | {"stack": tuple(one.get("stack", ()))}) for one in self.ranks]

    def blamed(self) -> RankAccount | None:
        """Return the rank that it blames."""
        return next((one for one in self.every() if one.rank == self.first), None)


def encode(account: NodeAccount) -> str:
    """Return an account as JSON of at most MOST_BYTES: first the stacks go, then ranks that nothing is known of."""
    text = json.dumps(pack(account))
    if len(text) > MOST_BYTES:
        text = json.dumps(pack(replace(account, ranks=tuple(one | _NO_ROOM for one in account.ranks))))
    if len(text) > MOST_BYTES:
        kept = [one | _NO_ROOM for one in account.ranks if one["rank"] == account.first]
        text = json.dumps(pack(replace(account, ranks=tuple(kept), kernel=(), facts={})))
    return text


def decode(raw: bytes | str) -> NodeAccount | None:
    """Return the account of a JSON text, cut and cleaned; None where it is none."""
    try:
        found: Any = json.loads(raw) if len(raw) <= 2 * MOST_BYTES else None
        account = unpack(NodeAccount, found, partial=True)
        ranks = [unpack(RankAccount, one, partial=True) for one in account.ranks[: 16 * _MOST_RANKS]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return replace(
        account,
        host=clean(account.host, 100),
        what=clean(account.what),
        persister=clean(account.persister),
        decision=clean(account.decision),
        ranks=tuple(pack(_cleaned(one)) for one in ranks),
        kernel=tuple(clean(line) for line in account.kernel[:8]),
        devices=tuple(clean(line) for line in account.devices[:8]),
        facts={clean(name, 100): clean(value, 100) for name, value in list(account.facts.items())[:64]},
    )


def _cleaned(one: RankAccount) -> RankAccount:
    return replace(
        one,
        phase=clean(one.phase, 40),
        doing=clean(one.doing, 120),
        error=clean(one.error),
        trace="\n".join(clean(line) for line in one.trace[-_MOST_TRACE:].splitlines()),
        stack=tuple(clean(frame, 160) for frame in one.stack[:_MOST_FRAMES]),
    )


def clean(text: object, most: int = _MOST_TEXT) -> str:
    """Return a text cut to a length, with what is not printable replaced."""
    cut = str(text)[:most]
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in cut)


def doing(stack: Sequence[str], kernel: str = "") -> str:
    """Return in a few words what a rank does, by its stack (innermost frame first) and what the kernel says of it; "" unknown.

    A frame that is known decides; the innermost one of another program is named as it is.
    """
    word = STOPPED if kernel.startswith("state T") else _by_stack(stack, kernel)
    return DISK if kernel.startswith("state D") and word not in WAITS else word


def _by_stack(stack: Sequence[str], kernel: str) -> str:
    for frame in stack:
        if (match := _COLLECTIVE.match(frame)) and match[1] in COLLECTIVES:
            return match[1]
        for pattern, word in _PLACES:
            if pattern.search(frame):
                return word
    if stack:
        return next((one for one in stack if not _LIBRARY.search(one)), stack[0])
    return f"{NO_CODE} ({kernel})" if kernel else ""


def phase_of(row: Any, now_ns: int) -> tuple[str, float]:
    """Return the phase of a rank by its control row, and the seconds since its last sign in it."""
    marks = (("training", "first_step"), ("first step", "restored"), ("restore", "restore_started"))
    name, at = next(((word, getattr(row, mark, 0)) for word, mark in marks if getattr(row, mark, 0)), ("start", 0))
    if row.paused and name == "training":
        name = "paused" if row.paused == 1 else "ended"
    return name, max(0.0, (now_ns - (max(at, row.heartbeat_ns) or now_ns)) / 1e9)


def differing(facts: Mapping[int, Mapping[str, Any]], node: int) -> list[str]:
    """Return the facts of a node that differ from those of all others, which agree: "torch 2.12, elsewhere 2.13"."""
    mine, others = facts.get(node, {}), [one for number, one in facts.items() if number != node and one]
    found = []
    for name in sorted({*mine, *(name for one in others for name in one)}):
        elsewhere = {str(one.get(name, "not set")) for one in others}
        here = str(mine.get(name, "not set"))
        if len(elsewhere) == 1 and {here} != elsewhere:
            found.append(f"{name} {here}, elsewhere {elsewhere.pop()}")
    return found
