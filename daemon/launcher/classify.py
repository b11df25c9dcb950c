"""From the agents' accounts to one verdict: where an incident began, its class, what the others did. Pure: no clock, no I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashckpt.core.incident import CONTINUE, RESTART, RESTART_WITHOUT, STOP, Incident, in_ranges
from flashckpt.daemon.launcher import account as said
from flashckpt.daemon.launcher.account import NodeAccount, RankAccount, differing

_TIMED_OUT = re.compile(
    r"collective operation timeout|timed out waiting|timed out after|monitoredBarrier|heartbeat monitor", re.IGNORECASE
)
_CODES = {
    10: "script", 11: "script", 12: "data", 13: "storage", 14: "memory", 15: "script", 16: "script", 17: "script",
    18: "script", 19: "data", 32: "storage", 40: "storage", 41: "storage", 42: "storage",
    -4: "machine", -7: "memory", -6: "script", -8: "script", -11: "script", 2: "script", 126: "script", 127: "script",
}  # fmt: skip
_TEXTS = (
    (r"out of memory|MemoryError|can't allocate memory|cannot allocate memory|bad_alloc", "memory"),
    (r"DataLoader worker|/torch/utils/data/|\bDataError\b|\bSamplerStateError\b", "data"),
    (
        r"no space left|input/output error|stale file handle|read-only file system|disk quota|transport endpoint",
        "storage",
    ),
    (r"\bECC\b|device-side|GPU is lost|fallen off the bus|uncorrectable", "machine"),
    (
        r"gaierror|name resolution|DistNetworkError|DistStoreError|network is unreachable|ncclRemoteError|ncclSystemError",
        "network",
    ),
    (r"collective operation timeout|unhandled system error", "network"),
)
_ENVIRONMENT = re.compile(
    r"ModuleNotFoundError|ImportError|No module named|cannot open shared object|FileNotFoundError|No such file|unable to find address"
    r"|PermissionError|Permission denied|no CUDA|CUDA driver|NVIDIA driver|not found|RootError|ConfigError",
    re.IGNORECASE,
)
_EARLY_S = 600.0
"""A rank without steps that ran longer has come beyond its start."""
_KILLED = re.compile(r"Killed process (\d+) \(([^)]*)\)")
_KERNEL = (
    ("memory", re.compile(r"out of memory|Killed process", re.IGNORECASE)),
    ("script", re.compile(r"NVRM: Xid \([^)]*\): (13|31|43|45),")),
    (
        "machine",
        re.compile(
            r"NVRM: Xid|Machine Check Exception|uncorrected .*error|uncorrectable .*error|EDAC .*\bUE\b|PCIe Bus Error: .*\(fatal",
            re.IGNORECASE,
        ),
    ),
    (
        "storage",
        re.compile(
            r"I/O error|(EXT4-fs|BTRFS|XFS|F2FS).*(error|shutdown|corrupt)|nfs: server .* not responding|blocked for more than"
            r"|Remounting filesystem read-only|lost async page write|nvme.*(timeout|controller is down)",
            re.IGNORECASE,
        ),
    ),
    ("network", re.compile(r"link is down|link down|NETDEV WATCHDOG|port .*down|carrier lost", re.IGNORECASE)),
)


def class_of_line(line: str) -> str:
    """Return the class of a line of the kernel's log; "" where it does not matter."""
    return next((name for name, pattern in _KERNEL if pattern.search(line)), "")


def timed_out(text: str) -> str:
    """Return the line of an error or a log which says that a collective timed out; "" without one."""
    return next((line.strip()[:300] for line in text.splitlines() if _TIMED_OUT.search(line)), "")


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node of the round that stopped answering.

    Attributes:
        node, host, ranks: It, and its ranks as text.
        silent_s: Seconds since its last sign.
        answers: Whether its machine still answers; None where that is not known.
    """

    node: int
    host: str
    ranks: str = ""
    silent_s: float = 0.0
    answers: bool | None = None

    def text(self) -> str:
        """Return it in words."""
        since = f", last sign {self.silent_s:.1f} s ago" if self.silent_s else ""
        reach = {
            True: "; its machine answers, its dlrun does not",
            False: "; it cannot be reached: its link or the machine is down",
        }
        ranks = f" with rank {self.ranks}" if self.ranks else ""
        known = "" if self.answers is None else reach[self.answers]
        return f"stopped answering{ranks}{since}{known}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an incident began, and what it was."""

    kind: str
    category: str
    what: str
    node: int = -1
    host: str = ""
    rank: RankAccount | None = None
    silent_s: float = 0.0
    findings: tuple[str, ...] = field(default=())


def judge(accounts: Mapping[int, NodeAccount], lost: Sequence[LostNode], now_s: float) -> Origin | None:
    """Return where an incident began; None where nothing but a change of membership happened.

    A node that stopped answering comes first, unless a rank elsewhere had failed, and not for a lost connection, while it still
    answered. What only lost a connection, or timed out in a collective, is never first as long as there is anything else.

    Args:
        accounts: The agents' accounts, by node.
        lost: Nodes that are gone; one that has reported is not silent.
        now_s: The clock by which `silent_s` counts, unix seconds.
    """
    if (lost or len(accounts) > 1) and (down := _own_link(accounts)):
        return down
    silent = sorted((one for one in lost if one.node not in accounts), key=lambda one: -one.silent_s)
    failed = sorted(_own_failures(accounts), key=lambda one: one[0].at_s)
    if silent and not (failed and failed[0][0].at_s < now_s - silent[0].silent_s):
        return _of_lost(silent)
    if failed:
        return _of_exit(*failed[0], accounts)
    stuck = [one for one in accounts.values() if one.kind == said.HANG]
    echoes = [one for one in accounts.values() if one.kind == said.FAILED]
    if stuck or echoes:
        return _of_wait(accounts, is_hang=bool(stuck), echoes=echoes)
    broken = [one for one in accounts.values() if one.kind == said.PERSISTER]
    return _of_persister(broken[0]) if broken else None


def _own_failures(accounts: Mapping[int, NodeAccount]) -> list[tuple[NodeAccount, RankAccount]]:
    found = []
    for one in accounts.values():
        rank = one.blamed()
        if one.kind == said.FAILED and rank is not None and not rank.is_echo:
            found.append((one, rank))
    return found


def _own_link(accounts: Mapping[int, NodeAccount]) -> Origin | None:
    """Return the node that reports its own link as down: to it all others seem lost."""
    for one in accounts.values():
        rank = one.blamed()
        down = next((line for line in one.devices if re.fullmatch(r"link \S+ is \w*down", line)), "")
        if down and (rank is None or rank.is_echo or one.kind != said.FAILED):
            return Origin(kind="node lost", category="network", what=down, node=one.node, host=one.host)
    return None


def _of_lost(silent: Sequence[LostNode]) -> Origin:
    first = silent[0]
    category = "network" if first.answers is False else "machine"
    others = tuple(f"node {one.node} ({one.host}) {one.text()}" for one in silent[1:])
    return Origin(
        kind="node lost", category=category, what=first.text(), node=first.node, host=first.host, silent_s=first.silent_s,
        findings=others,
    )  # fmt: skip


def _of_exit(node: NodeAccount, rank: RankAccount, accounts: Mapping[int, NodeAccount]) -> Origin:
    category, findings = class_of_exit(node, rank), []
    if differs := _only_here(node, rank, accounts):
        category, findings = "machine", differs
    error = f": {rank.error}" if rank.error and rank.error not in node.what else ""
    return Origin(
        kind="failure", category=category, what=f"{node.what}{error}", node=node.node, host=node.host, rank=rank,
        findings=tuple(findings),
    )  # fmt: skip


def class_of_exit(node: NodeAccount, rank: RankAccount) -> str:
    """Return the class of a rank's end, by the kernel's log, its exit code and its error."""
    text = f"{rank.error}\n{rank.trace}"
    if _is_killed_for_memory(node, rank, text):
        return "memory"
    if any(class_of_line(line) == "machine" for line in (*node.kernel, *node.devices)):
        return "machine"
    code = rank.code or 0
    code = code if code <= 128 else 128 - code
    if code in range(10, 43) and code in _CODES:
        return _CODES[code]
    if found := next((name for pattern, name in _TEXTS if re.search(pattern, text, re.IGNORECASE)), ""):
        return found
    return "script" if rank.error else _CODES.get(code, "script" if code >= 0 else "unknown")


def _is_killed_for_memory(node: NodeAccount, rank: RankAccount, text: str) -> bool:
    """Whether the kernel's OOM killer ended this rank, or a loader worker that its error names."""
    victims = [match for line in node.kernel if (match := _KILLED.search(line))]
    pids = {str(rank.pid), *re.findall(r"worker \(pid\(?s?\)? ?(\d+)", text)}
    return "OOM killer" in node.what or any(one[1] in pids or one[2] == f"rank{rank.rank}" for one in victims)


def _only_here(node: NodeAccount, rank: RankAccount, accounts: Mapping[int, NodeAccount]) -> list[str]:
    """Return what tells that a failure comes of this node's environment: before any step, of that kind, and on no other node."""
    others = [one for one in accounts.values() if one.node != node.node]
    is_early = rank.step < 0 and rank.phase_s < _EARLY_S
    if not is_early or not others or not _ENVIRONMENT.search(f"{rank.error}\n{rank.trace}\n{node.what}"):
        return []
    if any(one.error == rank.error for other in others for one in other.every() if not one.is_echo):
        return []
    facts = {one.node: one.facts for one in accounts.values()}
    differs = differing(facts, node.node)
    return [f"the environment of {node.host} differs: {'; '.join(differs[:5])}" if differs
            else f"no rank of another node failed this way: look at the environment of {node.host}"]  # fmt: skip


def _of_wait(accounts: Mapping[int, NodeAccount], *, is_hang: bool, echoes: Sequence[NodeAccount]) -> Origin:
    """Return the rank that the others waited for, by what all ranks did; the network where all were in one collective."""
    ranks = [(one, rank) for one in accounts.values() for rank in one.every()]
    timed_out = any(_TIMED_OUT.search(rank.error) for _, rank in ranks if rank.is_echo)
    kind = "hang" if is_hang or timed_out else "failure"
    if kind == "hang" and (odd := _outsider(ranks)) is not None:
        node, rank = odd
        what = f"in {rank.doing}" if rank.doing else "gave no sign"
        waited = "the others waited for it" if len(ranks) > 1 else "it made no progress"
        text = f"made no step for {rank.phase_s:.0f} s, {what}; {waited}"
        return Origin(kind=kind, category=_class_of_doing(rank), what=text, node=node.node, host=node.host, rank=rank,
                     silent_s=rank.phase_s)  # fmt: skip
    if kind == "hang":
        return _of_all([rank for _, rank in ranks])
    node = min(echoes, key=lambda one: one.at_s)
    blamed = node.blamed()
    return Origin(
        kind="failure", category="network", node=node.node, host=node.host, rank=blamed,
        what=f"lost its connection, and no rank or node is known to have failed: {blamed.error if blamed else node.what}",
    )  # fmt: skip


def _of_all(ranks: Sequence[RankAccount]) -> Origin:
    """Return the place of a hang in which no rank differs from the others."""
    silent = [rank.rank for rank in ranks if _is_quiet(rank) and not rank.is_echo]
    words = sorted({rank.doing for rank in ranks if not _is_quiet(rank)} - {said.LOST, said.TIMEOUT}) or [
        "a collective"
    ]
    if len(set(words) & said.COLLECTIVES) > 1:
        return Origin(
            kind="hang",
            category="script",
            what=f"the ranks wait for one another in different collectives: {', '.join(words)}",
        )
    category = "network" if set(words) <= said.WAITS | {"a collective"} else "script"
    where = f"what rank {in_ranges(silent)} did is not known" if silent else "though all ranks are in it"
    return Origin(kind="hang", category=category, what=f"{', '.join(words)} never returned, {where}")


def _is_quiet(rank: RankAccount) -> bool:
    return not rank.doing or rank.doing.startswith(said.NO_CODE)


def _outsider(ranks: Sequence[tuple[NodeAccount, RankAccount]]) -> tuple[NodeAccount, RankAccount] | None:
    """Return the rank that did something else than wait: one that is stopped, else one outside, else the one a step behind.

    One that gave no stack may have been too busy for it: it is outside only where no other one is, and where it is the only one.
    """
    seen = [(node, rank) for node, rank in ranks if rank.doing and rank.code is None]
    if stopped := [one for one in seen if one[1].doing in (said.STOPPED, said.DISK)]:
        return stopped[0]
    outside = [one for one in seen if one[1].doing not in said.WAITS]
    quiet = [one for one in outside if one[1].doing.startswith(said.NO_CODE)]
    outside = [one for one in outside if one not in quiet] or quiet
    if len(quiet) > 1 and outside is quiet:
        return None
    if outside and (len(outside) < len(ranks) or len(ranks) == 1):
        return min(outside, key=lambda one: one[1].step)
    named = [(node, rank) for node, rank in ranks if node.kind == said.HANG and rank.rank == node.first]
    if outside and named:
        return named[0]
    steps = [rank.step for _, rank in seen]
    behind = [one for one in seen if one[1].step < max(steps)] if steps else []
    lasted = {rank.doing for _, rank in seen}
    return behind[0] if len(behind) == 1 and len(lasted) > 1 else None


def _class_of_doing(rank: RankAccount) -> str:
    classes = {said.STOPPED: "unknown", said.DISK: "storage", said.STORAGE: "storage", said.LOADING: "data",
               said.RESTORING: "storage", said.DEVICE: "machine", said.START: "network"}  # fmt: skip
    return classes.get(rank.doing, "network" if rank.doing in said.COLLECTIVES else "script")


def _of_persister(node: NodeAccount) -> Origin:
    return Origin(
        kind="persister", category="storage", what=f"its persister: {node.persister}", node=node.node, host=node.host
    )


def incident(
    place: Origin,
    accounts: Mapping[int, NodeAccount],
    lost: Sequence[LostNode],
    *,
    name: tuple[str, str],
    job: str,
    restart: int,
    unheard: Sequence[str],
    action: tuple[str, str],
) -> Incident:
    """Return the record of an incident.

    Args:
        place: Where it began.
        accounts: Those of `judge`.
        lost: Those of `judge`, too.
        name: Its id and time.
        job: Id of the job.
        restart: Starts of the worker group before.
        unheard: Hosts without an account.
        action: The next step, and why.
    """
    rank = place.rank
    return Incident(
        id=name[0],
        time=name[1],
        job=job,
        restart=restart,
        kind=place.kind,
        category=place.category,
        node=place.node,
        host=place.host,
        rank=rank.rank if rank is not None else -1,
        pid=rank.pid if rank is not None else 0,
        step=rank.step if rank is not None else -1,
        what=place.what,
        silent_s=round(place.silent_s, 1),
        others=_others(accounts, rank),
        lost=tuple({"node": one.node, "host": one.host, "ranks": one.ranks, "silent_s": round(one.silent_s, 1), "answers": one.answers}
                   for one in lost if one.node not in accounts),
        unheard=tuple(unheard),
        findings=_findings(place, accounts),
        action=action[0],
        reason=action[1],
    )  # fmt: skip


def _others(accounts: Mapping[int, NodeAccount], first: RankAccount | None) -> tuple[dict[str, Any], ...]:
    groups: dict[str, list[RankAccount]] = defaultdict(list)
    for one in accounts.values():
        for rank in one.every():
            if first is None or rank.rank != first.rank:
                groups[rank.doing or (said.LOST if rank.is_echo else "")].append(rank)
    groups.pop("", None)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))[:16]
    return tuple(
        {"doing": word, "count": len(ranks), "ranks": in_ranges(rank.rank for rank in ranks),
         "stack": list(next((rank.stack for rank in ranks if rank.stack), ()))}
        for word, ranks in ordered
    )  # fmt: skip


def _findings(place: Origin, accounts: Mapping[int, NodeAccount]) -> tuple[str, ...]:
    found = list(place.findings)
    for one in accounts.values():
        found += [f"{one.host}, kernel: {line}" for line in one.kernel]
        found += [f"{one.host}: {line}" for line in one.devices]
        if one.persister and place.kind != "persister":
            found.append(f"{one.host}, persister: {one.persister}")
    return tuple(found[:16])


def action_of(
    place: Origin, accounts: Mapping[int, NodeAccount], lost: Sequence[LostNode], *, restarts: bool
) -> tuple[str, str]:
    """Return what happens next, and why: as the agent of the named node decided, or the first one that did."""
    if place.kind == "persister" and restarts:
        return CONTINUE, "training continues, and persisting is tried again"
    named = accounts.get(place.node)
    decided = [one.decision for one in ([named] if named else [*accounts.values()]) if one.decision]
    reason = decided[0] if decided else ""
    if not restarts:
        return STOP, reason
    return (RESTART_WITHOUT if any(one.node not in accounts for one in lost) else RESTART), reason
