"""How groups that are separate runs exchange what they trained, and what becomes of one that is not there.

Ranks of one place in their groups form a process group for each attempt at a synchronisation, on gloo. Who is in it, and
whether its result counts, says the roster.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

from flashckpt.core.records import pack, seal
from flashckpt.environment import env
from flashckpt.errors import StoreError, may_pass
from flashckpt.faults import crash_point
from flashckpt.sampler.datasets import reaching
from flashckpt.storage.factory import open_in_rank
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.parallel.distributed import from_first
from flashckpt.trainer.parallel.groups import common_settings, rosters_of
from flashckpt.trainer.separate_runs.roster import Here, Roster, Synchronisations, read_roster, refuse_others

logger = logging.getLogger(__name__)
Gloo: Any = c10d.ProcessGroupGloo  # of whose methods torch has no types
_POLL_S, _LONGEST_POLL_S, _ANSWER_S, _LEAST_S, _SHOWN_S = 0.1, 2.0, 5.0, 10.0, 60.0


class GroupMeeting:
    """Meets the other groups of a run. A snapshot has the number of the synchronisation that its group took part in last.

    Attributes:
        is_over: The others have ended the run without this group.
    """

    flashckpt_replicated = True

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        settings = config.parallel
        self.group, self.version, self.is_over = settings.group, 0, False
        self._last, self._every, self._device = config.train.steps, settings.sync_every, device
        self._count, self._settings = settings.groups, common_settings(config)
        self._address, self._timeout = settings.sync_address, timedelta(seconds=settings.timeout_s)
        self._patience = timedelta(seconds=max(settings.sync_wait_s, _LEAST_S))
        store = open_in_rank(rosters_of(config), config.checkpoint.storage_options)
        self._rosters = Synchronisations(store, settings.groups, settings.sync_wait_s)
        self._server: TCPStore | None = None
        self._at: tuple[int, str] | None = None  # the attempt that this group has come to
        self._shown = time.monotonic()

    def state_dict(self) -> dict[str, int]:
        """Return plain values."""
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind the synchronisation of that number."""
        self.version = int(state["version"])

    def is_behind(self) -> bool:
        """Return whether the others have met without this group. Collective."""
        newest = self._rosters.newest() if env.RANK == 0 else 0
        return int(from_first(b"%d" % newest, self._device)) > self.version

    def meet(
        self, step: int, changes: Sequence[Tensor], common: Sequence[Tensor]
    ) -> tuple[Roster, list[Tensor], list[Tensor]] | None:
        """Wait for the next synchronisation that this group takes part in, and return it. Collective.

        Args:
            step: That this group has trained to.
            changes: What it trained, on the host.
            common: What groups have in common, on the host.

        Returns:
            Its roster, the mean of `changes` over the groups whose training counts, and `common` of these. None: the others
            have ended the run.
        """
        with reaching.waiting():
            while True:
                answer = b""
                while not answer:
                    answer = from_first(self._asked(step) if env.RANK == 0 else b"", self._device)
                folder, _, raw = answer.partition(b" ")
                if not raw:
                    self.is_over = True
                    return None
                roster = read_roster(raw, folder.decode())
                exchanged, self._at = self._attempt(folder.decode(), roster, changes, common), None
                if exchanged is not None:
                    self.version = roster.number
                    self._report(roster)
                    if not (self.keeps(roster) and step == roster.step + self._every):  # else its share is trained
                        return roster, *exchanged

    def keeps(self, roster: Roster) -> bool:
        """Return whether this group continues as if the synchronisation had not been."""
        return roster.again and self.group in roster.gave

    def _asked(self, step: int) -> bytes:
        """As `_look`; storage that is out of reach is asked again."""
        try:
            return self._look(step)
        except StoreError as error:
            if not may_pass(error):
                raise
            logger.warning("the groups cannot be asked for: %s", error.problem)
            time.sleep(_LONGEST_POLL_S)
            return b""

    def _look(self, step: int) -> bytes:
        """Return folder and roster of the attempt that this group is in; nothing: ask again; "over": the run has ended."""
        end, pause_s = time.monotonic() + _ANSWER_S, _POLL_S if self._at is None else _LONGEST_POLL_S
        while time.monotonic() < end:
            if self._at is None:
                newest = self._rosters.newest()
                last = self._rosters.roster(newest)
                refuse_others([self._settings, "" if last is None else last.settings])
                if newest > self.version and last is not None and last.step >= self._last:
                    return b"over"
                attempt = newest + 1, self._rosters.open_attempt(newest + 1)
                here = Here(
                    group=self.group, version=self.version, step=step, address=self._serve(), settings=self._settings
                )
                self._rosters.come(attempt[1], here)
                self._at = attempt
            number, folder = self._at
            roster = self._rosters.decided(folder, number)
            if roster is not None and self.group in roster.groups:
                return folder.encode() + b" " + seal(pack(roster))
            if roster is not None and self._rosters.is_over(folder):
                self._at = None  # it began before this group came
                continue
            self._show(folder, number)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return b""

    def _serve(self) -> str:
        """Return the address of the store that this group opens for exchanges."""
        host = self._address or _own_address()
        if self._server is None:
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            port = listener.getsockname()[1]
            self._server = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return f"{host}:{self._server.port}"

    def _attempt(
        self, folder: str, roster: Roster, changes: Sequence[Tensor], common: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the result of one attempt, if all of its groups have it. Collective."""
        found: tuple[list[Tensor], list[Tensor]] | None = None
        others: Any = None
        try:
            others = self._joined(folder, roster)
            found = self._exchanged(others, roster, changes, common)
        except (RuntimeError, ValueError, OSError) as error:
            hint = ""
            if roster.address.startswith("127."):
                hint = "; only its own machine reaches 127.*: where groups are on others, set parallel.sync_address"
            logger.warning("synchronisation %d is tried again: %s%s", roster.number, str(error).split("\n", 1)[0], hint)
        has_all = torch.tensor([float(found is not None)], device=self._device)
        dist.all_reduce(has_all, dist.ReduceOp.MIN)
        counts = self._settled(folder, others, is_good=bool(has_all.item())) if env.RANK == 0 else False
        counts = from_first(b"%d" % counts, self._device) == b"1"
        return found if counts and has_all.item() else None

    def _joined(self, folder: str, roster: Roster) -> Any:
        """Return the process group with the ranks of this place in the other groups."""
        if (self.group in roster.gave) != (self.version == roster.base):
            raise ValueError("this group was restarted since it came")
        host, _, port = roster.address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._patience)
        options = Gloo._Options()  # noqa: SLF001 -- torch has no public names for them
        options._devices = [Gloo.create_device(hostname=self._address or _own_address())]  # noqa: SLF001
        options._timeout = self._patience  # noqa: SLF001
        place, size = roster.groups.index(self.group), len(roster.groups)
        others = Gloo(PrefixStore(f"{folder}/{env.RANK}", store), place, size, options)
        others._set_default_timeout(self._timeout)  # noqa: SLF001
        return others

    def _exchanged(
        self, others: Any, roster: Roster, changes: Sequence[Tensor], common: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        gives, first = self.group in roster.gave, roster.groups.index(roster.gave[0])
        means = [one.clone() if gives else torch.zeros_like(one) for one in changes]
        for number, mean in enumerate(means if not roster.again else []):
            if number == len(means) // 2:
                crash_point("groups.during-exchange")
            others.allreduce([mean]).wait()
            mean.div_(len(roster.gave))
        shared = [one.clone() for one in common]
        for one in (
            shared if roster.gave != roster.groups or not roster.base else []
        ):  # the first time nothing is common yet
            others.broadcast(one, root=first).wait()
        return means, shared

    def _settled(self, folder: str, others: Any, *, is_good: bool) -> bool:
        """Return whether an attempt counts: the first ranks of all groups have met again behind its exchange."""
        try:
            if is_good and others is not None:
                others.barrier().wait()
        except RuntimeError:
            is_good = False
        return self._rosters.settle(folder, is_good=is_good)

    def _report(self, roster: Roster) -> None:
        if env.RANK:
            return
        absent = sorted({*range(self._count)} - {*roster.groups})
        new = sorted({*roster.groups} - {*roster.gave})
        text = f"step {roster.step}: synchronised {_listed(roster.gave)}"
        text += f"; taken in: {_listed(new)}" if new else ""
        text += f"; left out: {_listed(absent)}" if absent else ""
        if roster.again:
            text = f"step {roster.step}: all groups continue behind it, what was synchronised after it is lost"
        logger.log(logging.WARNING if absent or new or roster.again else logging.INFO, "%s", text)

    def _show(self, folder: str, number: int) -> None:
        if time.monotonic() - self._shown > _SHOWN_S:
            self._shown = time.monotonic()
            logger.warning(
                "waiting for %s to synchronise", _listed(self._rosters.missing(folder, number)) or "the others"
            )


def _listed(groups: Sequence[int]) -> str:
    return f"group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))}" if groups else ""


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
