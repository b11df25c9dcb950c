"""One report per incident: each agent sends its account through the round's store, the first one gives the verdict.

Restarts wait for nothing here: accounts are sent before a node joins the next round, and judged after it. Where the job ends,
the first agent waits a few seconds for the others.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, ParamSpec, TypeVar

from torch import __version__ as torch_version

from flashckpt import __version__, entry_points
from flashckpt.core.incident import Incident, as_values
from flashckpt.core.records import pack
from flashckpt.daemon.launcher import account as said
from flashckpt.daemon.launcher import classify, findings
from flashckpt.daemon.launcher.account import NodeAccount, RankAccount
from flashckpt.daemon.launcher.classify import LostNode
from flashckpt.daemon.launcher.context import WorkerContext
from flashckpt.daemon.launcher.failure import CRASHES, FailureReport, WorkerExit
from flashckpt.daemon.launcher.hang import RankState, frames_of
from flashckpt.daemon.launcher.stop import Group, KeyValueStore
from flashckpt.daemon.launcher.watch import JobWatch
from flashckpt.daemon.machine.kernel_log import KernelLog, Links, device_errors
from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.shm.incident_files import write_incident

ACCOUNTS_S = 4.0
"""Seconds that the first agent waits for the others' accounts where the job ends; one that restarts waits for none."""
PERSISTER_S = 10.0
"""Seconds that a persister may fail before that is an incident: it is replaced within one, and tries again at once."""
_POLL_S = 0.05
_LOOK_S = 1.0
_KEY, _PERSISTER = "flashckpt/account", "flashckpt/persister"
_FACTS = re.compile(r"NCCL_|GLOO_|CUDA_|TORCH_|NVIDIA_|PYTHONPATH$|LD_LIBRARY_PATH$|OMP_NUM_THREADS$")
_DEVICE = re.compile(r"cuda|nccl|device", re.IGNORECASE)
"""Errors, beside the codes of CRASHES, after which the devices are asked, which may take a second."""
_LOCAL = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
"""Variables that may differ from node to node."""
_GONE = (RuntimeError, ValueError, TypeError, KeyError, TimeoutError)  # the store's host is gone
_log = logging.getLogger("flashckpt.dlrun")


P = ParamSpec("P")
T = TypeVar("T")


def _harmless(method: Callable[P, T]) -> Callable[P, T | None]:
    """Let no error of a report end a job."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the job is worth more
            _log.warning("the report of an incident failed: %s: %s", type(error).__name__, error)
            return None

    return guarded


def new_name() -> tuple[str, str]:
    """Return the `id` and `time` of an incident of this moment."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", now.isoformat(timespec="milliseconds")


class Incidents:
    """Sends the accounts of one agent, and judges those of all where it is the first one."""

    def __init__(self, watch: JobWatch) -> None:
        self._watch = watch
        self._kernel = KernelLog(env.FLASHCKPT_KERNEL_LOG, classify.class_of_line)
        self._links = Links()
        self._own: NodeAccount | None = None
        self._failing_s: float | None = None
        self._looked_s = 0.0
        self._is_reported = False
        self._hook = entry_points.load(entry_points.EXTRAS, "hook")(_log) if env.FLASHCKPT_HOOK else None
        self.starts = 0

    def close(self) -> None:
        """Close the kernel's log, and wait a moment for the hook."""
        self._kernel.close()
        if self._hook is not None:
            self._hook.close()

    @_harmless
    def tell(self, event: str, **fields: Any) -> None:
        """Tell the hook, where there is one."""
        if self._hook is not None:
            self._hook.tell(event, **fields)

    # -- the account of this node ------------------------------------------------------------------------

    @_harmless
    def failed(self, context: WorkerContext, rows: Sequence[Any], report: FailureReport) -> None:
        """Note the failure of ranks."""
        ended = {item.rank: item for item in context.exits() if item.failed or item is report.first}
        ranks = [
            _rank(item.rank, item.pid, rows, item, report if item is report.first else None) for item in ended.values()
        ]
        ranks += [
            replace(_rank(state.rank, state.pid, rows), doing=said.doing(state.stack, state.kernel), stack=state.stack)
            for state in context.survivors
            if state.rank not in ended
        ]
        what = "lost the connection to another node" if report.elsewhere else report.cause
        first = next(one for one in ranks if one.rank == report.first.rank)
        asks = _DEVICE.search(f"{first.error}\n{first.trace}") or first.code in CRASHES
        self._note(said.FAILED, report.first.at_ns / 1e9, ranks, first=first.rank, what=what, devices=bool(asks))

    @_harmless
    def hangs(self, states: Sequence[RankState], rows: Sequence[Any], suspect: int, what: str) -> None:
        """Note that ranks made no progress; `suspect` is -1 where none differs from the others."""
        self._note(said.HANG, time.time(), _ranks_of(states, rows), first=suspect, what=what, devices=True)

    @_harmless
    def leaves(self, states: Sequence[RankState], rows: Sequence[Any]) -> None:
        """Note that the ranks ran, and are restarted because other nodes wait."""
        self._note(said.LEFT, time.time(), _ranks_of(states, rows))

    def _note(
        self,
        kind: str,
        at_s: float,
        ranks: Sequence[RankAccount],
        *,
        first: int = -1,
        what: str = "",
        devices: bool = False,
    ) -> None:
        self._own = NodeAccount(
            node=0,
            host=socket.gethostname(),
            kind=kind,
            at_s=at_s,
            first=first,
            what=what.splitlines()[0] if what else "",
            ranks=tuple(pack(one) for one in ranks),
            kernel=tuple(self._kernel.fresh()),
            devices=(*self._links.changed(), *(device_errors() if devices else ())),
            persister=self._watch.persister_problem(),
            facts=facts(),
        )

    @_harmless
    def send(self, others: Group | None, *, restarts: bool, decision: str) -> None:
        """Send what was noted to the first agent, with what this node does about it."""
        if self._own is None:
            return
        node = others.rank if others is not None else 0
        text = said.encode(replace(self._own, node=node, restarts=restarts, decision=decision))
        self._own = said.decode(text)  # as the others read it
        if others is not None:
            _put(others.store, f"{_KEY}/{node}", text)

    # -- the verdict -------------------------------------------------------------------------------------

    @_harmless
    def conclude(
        self,
        others: Group | None,
        lost: Mapping[int, str],
        *,
        restarts: bool,
        silent_s: Callable[[int], float],
    ) -> Incident | None:
        """Give the verdict on what was noted, if this is the first agent: print it, and write it into the job's folder.

        Args:
            others: The nodes of the round that has ended; None where this one is alone.
            lost: Those that are gone, group rank -> address.
            restarts: Whether the job restarts.
            silent_s: Returns the seconds since the last sign of a node.
        """
        own, self._own = self._own, None
        self.restarted()
        if own is None or (others is not None and others.rank != min(set(range(others.size)) - set(lost), default=0)):
            return None
        accounts = {own.node: own}
        unheard: list[str] = []
        if others is not None:
            accounts |= _gather(others, wait_s=0.0 if restarts else ACCOUNTS_S, gone=set(lost))
            answers = findings.answering({node: lost[node] for node in lost if node not in accounts})
            silent = [
                LostNode(
                    node=node,
                    host=said.clean(findings.host_of(others.store, node) or address, 100),
                    ranks=findings.ranks_of(others.store, node),
                    silent_s=silent_s(node),
                    answers=answers.get(node),
                )
                for node, address in lost.items()
            ]
            unheard = [
                findings.host_of(others.store, node) or f"node {node}"
                for node in range(others.size)
                if node not in accounts and node not in lost
            ]
        else:
            silent = []
        return self._judge(dict(sorted(accounts.items())), silent, unheard, restarts=restarts)

    @_harmless
    def store_lost(self, endpoint: str, others: Group | None) -> None:
        """Report, on every node, that the host of the rendezvous store is gone: there is nothing left to send accounts through."""
        self._note(said.LEFT, time.time(), [])
        own, self._own = self._own, None
        assert own is not None
        answers = findings.answering({0: endpoint.rpartition(":")[0].strip("[]")})
        lost = LostNode(node=-1, host=f"the host of the rendezvous store, {endpoint},", answers=answers[0])
        self._judge({0: replace(own, node=others.rank if others is not None else 0)}, [lost], [], restarts=False)

    def _judge(
        self,
        accounts: Mapping[int, NodeAccount],
        lost: Sequence[LostNode],
        unheard: Sequence[str],
        *,
        restarts: bool,
        quiet: bool = False,
    ) -> Incident | None:
        place = classify.judge(accounts, lost, time.time())
        if place is None:
            return None
        found = classify.incident(
            place,
            accounts,
            lost,
            name=new_name(),
            job=self._watch.job.job if self._watch.job is not None else "",
            restart=self.starts,
            unheard=unheard,
            action=classify.action_of(place, accounts, lost, restarts=restarts),
        )
        self.report(found, quiet=quiet)
        return found

    def report(self, found: Incident, *, quiet: bool = False) -> None:
        """Print an incident, tell the hook, and write it into the job's folder."""
        if not quiet:  # else the owner of the persister has logged it
            _log.error("%s", found.render())
        self.tell("incident", incident=as_values(found))
        if self._watch.job is None:
            return
        try:
            write_incident(self._watch.job.path, found)
        except (OSError, FlashckptError) as error:
            _log.warning("the report of incident %s cannot be written: %s", found.id, str(error).partition("\n")[0])

    # -- the persister -----------------------------------------------------------------------------------

    @_harmless
    def tick(self, others: Group | None) -> None:
        """Report a persister that has failed for a while; on the first node also those of the others. Once in a round."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        problem = self._watch.persister_problem()
        self._failing_s = None if not problem else now if self._failing_s is None else self._failing_s
        is_due = self._failing_s is not None and now - self._failing_s > PERSISTER_S
        if self._is_reported or not (is_due or (others is not None and others.rank == 0)):
            return
        own = NodeAccount(node=others.rank if others else 0, host=socket.gethostname(), kind=said.PERSISTER,
                          at_s=time.time(), persister=problem)  # fmt: skip
        found = own if is_due and (others is None or others.rank == 0) else None
        if others is not None and others.rank == 0:
            found = found or _get(others.store, _PERSISTER)
        elif others is not None:
            _put(others.store, _PERSISTER, said.encode(own))
        self._is_reported = is_due or found is not None
        if found is not None:
            self._judge({found.node: found}, [], [], restarts=True, quiet=found is own)

    @_harmless
    def ends_without_checkpoint(self, problem: str) -> None:
        """Report that the job has ended, and nothing of it is on storage."""
        own = NodeAccount(node=0, host=socket.gethostname(), kind=said.PERSISTER, at_s=time.time(), persister=problem)
        self._judge({0: own}, [], [], restarts=False, quiet=True)

    def restarted(self) -> None:
        """Begin again: a persister that still fails in the next round is reported again."""
        self._is_reported, self._failing_s = False, None


def facts() -> dict[str, str]:
    """Return what can differ between the environments of two nodes: versions, and variables of the libraries."""
    found = {"python": platform.python_version(), "torch": str(torch_version), "flashckpt": __version__}
    names = sorted(name for name in env.mapping if _FACTS.match(name) and name not in _LOCAL)
    return found | {name: env.mapping[name][:100] for name in names[:60]}


def _rank(
    rank: int, pid: int, rows: Sequence[Any], item: WorkerExit | None = None, report: FailureReport | None = None
) -> RankAccount:
    row = next((one for one in rows if one.pid == pid), None)
    phase, phase_s = said.phase_of(row, time.monotonic_ns()) if row is not None else ("start", 0.0)
    found = RankAccount(
        rank=rank, pid=pid, phase=phase, phase_s=round(phase_s, 1), step=row.step if row is not None else -1
    )
    if item is None:
        return found
    trace = item.traceback or ("\n".join(report.log_lines) if report is not None else "")
    timed_out = classify.timed_out(f"{item.summary}\n{trace}") if item.failed else ""
    return replace(
        found,
        code=item.code,
        error=timed_out or _last_line(item.summary),
        trace=trace[-3000:] if report is not None else "",
        is_echo=item.is_echo or bool(timed_out),
        doing=_lost_in(item, timed_out) if item.is_echo or timed_out else "",
    )


def _lost_in(item: WorkerExit, timed_out: str) -> str:
    """Return the collective in which a rank lost its connection or timed out, in words where its traceback does not say."""
    word = said.doing(frames_of(item.traceback))
    return word if word in said.COLLECTIVES else said.TIMEOUT if timed_out else said.LOST


def _ranks_of(states: Sequence[RankState], rows: Sequence[Any]) -> list[RankAccount]:
    return [
        replace(
            _rank(state.rank, state.pid, rows),
            step=state.step,
            doing=said.doing(state.stack, state.kernel),
            stack=state.stack[:12],
        )
        for state in states
    ]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def _put(store: KeyValueStore, key: str, text: str) -> None:
    try:
        store.set(key, text)
    except _GONE as error:
        _log.warning("the account of this node cannot be sent: %s", str(error).partition("\n")[0])


def _get(store: KeyValueStore, key: str) -> NodeAccount | None:
    try:
        return said.decode(store.get(key)) if store.check([key]) else None
    except _GONE:
        return None


def _gather(others: Group, *, wait_s: float, gone: set[int]) -> dict[int, NodeAccount]:
    """Return the accounts that are there, and those that come within `wait_s` seconds; of `gone` nodes none is waited for."""
    end, found = time.monotonic() + wait_s, dict[int, NodeAccount]()
    missing = [node for node in range(others.size) if node != others.rank]
    while True:
        for node in missing.copy():
            if (one := _get(others.store, f"{_KEY}/{node}")) is not None:
                found[node] = replace(one, node=node)
                missing.remove(node)
            if time.monotonic() > end + ACCOUNTS_S:
                return found
        if not set(missing) - gone or time.monotonic() >= end:
            return found
        time.sleep(_POLL_S)
