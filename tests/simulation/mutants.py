"""Bugs planted into the product's own lines, which the simulation must find: `python -m simulation.mutants`.

Each is one replacement in one file of the product, made while the module is imported, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

from support.paths import ROOT


@dataclass(frozen=True)
class Mutant:
    """One planted bug: what it is called, the file, the line before and after."""

    name: str
    file: str
    before: str
    after: str


_R = "extras/replicas"
_P, _C, _S, _L = "daemon/persister", "flashckpt/checkpoint", "flashckpt/shm", "flashckpt/planning"
MUTANTS = [
    # slots
    Mutant("M1: the newest common slot is overwritten", f"{_S}/acks.py",
           "identity < newest_common)", "identity <= newest_common)"),
    Mutant("M1: what nobody else holds yet counts as old", f"{_S}/acks.py",
           "newest_common = max(common, default=None)", "newest_common = max((h.identity for h in headers), default=None)"),
    Mutant("M1: superseded slots up to the next step", f"{_S}/acks.py",
           "identity <= superseded)", "identity.generation <= superseded.generation + 1)"),
    Mutant("a pin does not keep a slot", f"{_S}/segment.py",
           "if slot in self._writing or not self._lease.exclusive(1 + slot):", "if slot in self._writing:"),
    Mutant("a slot is never let go", f"{_S}/segment.py",
           "        self._lease.release(1 + slot)\n\n    def _put_both", "        pass\n\n    def _put_both"),
    Mutant("COMPLETE before the manifest is there", f"{_S}/slot_writer.py",
           "        self._buffer[at : at + len(manifest)] = manifest\n", "        del at\n"),
    Mutant("the header says WRITING in neither copy", f"{_S}/segment.py",
           "header = self._put_both_headers(slot, header)\n        self._writing.add",
           "header = replace(header, sequence=self.header(slot).sequence)\n        self._writing.add"),
    Mutant("a pin is not checked again under its lock", f"{_S}/inventory.py",
           "if taken is not None and taken.header.identity != held.header.identity:", "if False:"),
    # snapshots with bad numbers
    Mutant("a suspect snapshot is preferred", f"{_L}/selection.py",
           "for i in sorted(wanted, key=suspects.__contains__)", "for i in wanted"),
    Mutant("a suspect checkpoint takes the place of a clean one", f"{_C}/retention.py",
           "place < last or (not info.suspects and clean <= last)", "place < last"),
    Mutant("a checkpoint forgets that it is suspect", f"{_C}/catalog.py",
           "suspects=tuple(i.identity for i in infos if i.suspects)", "suspects=()"),
    # acknowledgements
    Mutant("common: what one rank holds", f"{_S}/acks.py",
           "frozenset(parts[0].common).intersection(*(part.common for part in parts[1:]))",
           "frozenset(parts[0].common).union(*(part.common for part in parts[1:]))"),
    Mutant("a rank that has not published counts", f"{_S}/acks.py",
           "is_whole = bool(parts) and all(part.is_whole for part in parts)", "is_whole = bool(parts)"),
    Mutant("watermark off by one", f"{_S}/acks.py",
           "self.listed_above < identity <= self.low_watermark", "self.listed_above < identity < self.low_watermark"),
    Mutant("watermark is not published", f"{_S}/acks.py",
           "self._low_watermark = max(self._low_watermark, low_watermark)", "pass"),
    Mutant("rolled-back snapshots are acknowledged", f"{_S}/acks.py",
           "if i[0] == self._generation or not is_rolled_back(i, self._line)]", "]"),
    Mutant("what was restored is not common", f"{_S}/acks.py",
           "common = {*self.common, *([restored] if restored is not None else [])}", "common = {*self.common}"),
    Mutant("the relay never publishes the job's record", f"{_S}/ack_relay.py",
           "self._control.publish_job_acks(self._generation, encode_group(job))", "pass"),
    Mutant("the relay rests at once", f"{_S}/ack_relay.py",
           "        if self._may_rest(mine, outgoing):\n", "        if self._published is not None:\n"),
    Mutant("a dead relay is believed for ever", f"{_S}/messages.py",
           "if not 0 <= silent_s < SILENT_S or not _is_running(pid):", "if False:"),
    # lineage and selection
    Mutant("rolled back: off by one", "flashckpt/core/lineage.py",
           "        if step > parent_step:\n", "        if step > parent_step + 1:\n"),
    Mutant("rolled back: earlier generations are forgotten", "flashckpt/core/lineage.py",
           "        if parent_generation < generation:  #", "        if False:  #"),
    Mutant("rolled back: the own generation counts", "flashckpt/core/lineage.py",
           "if record.number <= generation or record.parent is None:", "if record.number < generation or record.parent is None:"),
    Mutant("selection ignores the lineage", f"{_L}/selection.py",
           "wanted = [i for i in wanted if not is_rolled_back(i, lineage)]", "pass"),
    Mutant("selection: oldest first", "flashckpt/core/lineage.py",
           "for identity in sorted({*whole, *part}, reverse=True):", "for identity in sorted({*whole, *part}):"),
    Mutant("selection: what some ranks hold is common", "flashckpt/core/lineage.py",
           "if size > 0 and _holds_all(held, size) and", "if size > 0 and"),
    Mutant("the next generation has the number of the last", f"{_L}/selection.py",
           "next_generation=highest + 1,", "next_generation=max(highest, 1),"),
    Mutant("generations of one number count as one", "flashckpt/core/records.py",
           "return digest(token.encode()) % 0xFFFFFF + 1 if token else 0", "return 0"),
    Mutant("slots that were rolled back are not emptied", "flashckpt/restore/gather.py",
           "                segment.mark_empty(slot)\n", "                pass\n"),
    Mutant("a round that was missed is forgotten", "flashckpt/restore/gather.py",
           "if folder and has_missed(Path(folder)):", "if False:"),
    Mutant("all slots are emptied", "flashckpt/restore/gather.py",
           "if header.is_complete and (is_lost or is_rolled_back(header.identity, [record, *found.lineage])):",
           "if header.is_complete:"),
    Mutant("what the root alone knows to be rolled back stays in memory", "flashckpt/restore/gather.py",
           "is_rolled_back(header.identity, [record, *found.lineage])", "is_rolled_back(header.identity, [record])"),
    Mutant("the lineage is not written", "flashckpt/restore/gather.py",
           "        directory.write_generation(record)\n    for path", "        pass\n    for path"),
    # agents and data
    Mutant("memory that is behind its generation is believed", f"{_L}/selection.py",
           "return began is not None and candidate.identity < began", "return False"),
    Mutant("a round that was missed is not noticed", "daemon/launcher/rounds.py",
           "self._number >= 0 and number != self._number + 1, number", "False, number"),
    Mutant("new nodes are preferred to those that trained", "daemon/launcher/rounds.py",
           "key=lambda node: (-nodes[node], node))", "key=lambda node: (nodes[node], node))"),
    Mutant("the budget of restarts ends at the first failure", "daemon/launcher/budget.py",
           "        if self.left == 0:\n", "        if self.left >= 0:\n"),
    Mutant("a recorded position in the data is not taken", "sampler/sampler.py",
           "        self.cursor.adopt(state)\n", "        del state\n"),
    Mutant("a replica has one sample less", "sampler/order/dealing.py",
           "return max(0, -(-(size - rank) // replicas))", "return max(0, (size - rank) // replicas)"),
    Mutant("a step is not counted in the data", "sampler/sampler.py",
           "self.cursor.settle(self._iterations.behind_dropped(target))", "pass"),
    # negotiation
    Mutant("no fence before a decision", f"{_P}/negotiation.py",
           "        yield p.CheckFence()\n        yield p.WriteIntent", "        yield p.WriteIntent"),
    Mutant("an intent of a rolled-back lineage is joined", f"{_P}/negotiation.py",
           "if not is_rolled_back(intent.identity, [tick.generation]):", "if True:"),
    Mutant("abandoned intents are waited for", f"{_P}/negotiation.py",
           "if not lost:\n            return True", "if True:\n            return True"),
    Mutant("the floor does not rise with a commit", f"{_P}/negotiation.py",
           "        self.floor = max(self.floor, identity)\n        is_committed", "        is_committed"),
    Mutant("attempts before a pause are forgotten", f"{_P}/negotiation.py",
           "self._tried[1] if self._tried[0] == intent.identity else 0", "0"),
    Mutant("a candidate is not unpinned when another is", f"{_P}/negotiation.py",
           "isinstance((yield p.PinSlots(identity, ranks)), p.Pinned):\n            yield from self._unpin()\n",
           "isinstance((yield p.PinSlots(identity, ranks)), p.Pinned):\n"),
    Mutant("agreement: part of the world is enough", f"{_P}/agreement.py",
           "if not covers_world(proposals):", "if False:"),
    Mutant("agreement: any pinned snapshot is chosen", f"{_P}/agreement.py",
           "(only,) = pinned if len(pinned) == 1 else (None,)", "only = max((one for one in pinned if one), default=None)"),
    Mutant("agreement: urgent takes what one node holds", f"{_P}/agreement.py",
           "shared = set.intersection(*(", "shared = set.union(*("),
    Mutant("agreement: a persist step that was skipped is no miss", f"{_P}/agreement.py",
           "not (is_gone and any(", "not (False and any("),
    Mutant("slots are not looked at while the root is asked", f"{_P}/coordinator.py",
           "with self._seeker.seeking(self.negotiation.sought):", "with self._seeker.seeking(None):"),
    # persist and commit
    Mutant("the lease is not waited for", f"{_P}/persist.py",
           "if not is_free and now_s - self.since_s < self.expires_s:", "if not is_free and now_s < self.since_s:"),
    Mutant("the lease of a dead node never expires", f"{_P}/persist.py",
           "if not is_free and now_s - self.since_s < self.expires_s:", "if not is_free:"),
    Mutant("commit without all indexes", f"{_P}/persist.py",
           "        if not indexes.missing:\n            return True", "        return True"),
    Mutant("a commit is reported that was not made", f"{_P}/persist.py",
           "return Outcome.GIVEN_UP if isinstance(answer, p.TombstoneFound) else Outcome.COMMITTED", "return Outcome.COMMITTED"),
    Mutant("waiting for others ends at once", f"{_P}/persist.py",
           "if now_s - self.written_s > patience_s:", "if now_s - self.written_s > 0:"),
    Mutant("other writers are waited for without end", f"{_P}/persist.py",
           "if now_s - self.written_s > patience_s:", "if False:"),
    Mutant("the writers of a commit are those here", f"{_P}/coordinator.py",
           "commit(store, prefix, intent.writers, is_wanted=is_wanted, token=token)",
           "commit(store, prefix, sorted(self.flush.pins), is_wanted=is_wanted, token=token)"),
    Mutant("a run that others have overtaken claims its number late", f"{_C}/root_records.py",
           "if claim.is_overtaken({number: mark_of(claimed_token(store, number)) for number in before}):", "if False:"),
    Mutant("what another run's number names is committed", f"{_C}/merging.py",
           "if token and index.token and index.token != token:", "if False:"),
    Mutant("the index before the packs", f"{_P}/flush.py",
           "completes = not self._is_claimed and self._indexes.keys() >= self._wanted",
           "completes = not self._is_claimed and bool(self._indexes)"),
    Mutant("a failed write counts as finished", f"{_P}/flush.py",
           "            return WriteFailed(self.cause_of(error), problem_of(error), tuple(failed))\n", "            break\n"),
    Mutant("after a failure there is no next attempt", f"{_P}/attempts.py",
           "return time.monotonic() >= self._again_s", "return self._again_s == 0.0"),
    Mutant("a digest is not checked while packs are written", f"{_C}/writer.py",
           "            if found != expected:\n", "            if False:\n"),
    Mutant("a snapshot that was overwritten is persisted", f"{_S}/lease.py",
           "        if header != self.header and (self.kept is None or header.identity <= self.header.identity):\n"
           "            return False\n", ""),
    Mutant("a slot is given back before it is durable", f"{_C}/writer.py",
           "    names = {} if done is None else done\n",
           "    names = {} if done is None else done\n    keep_only(0, 0)\n"),
    Mutant("what was given back is written again", f"{_C}/writer.py",
           "for number, pack in packs if number not in done]", "for number, pack in packs]"),
    Mutant("MANIFEST is written over", f"{_C}/writer.py",
           'if not store.put_if_absent(f"{prefix}/{MANIFEST}", encoded):',
           'if store.put(f"{prefix}/{MANIFEST}", encoded):'),
    Mutant("packs are not looked at before the commit", f"{_C}/indexes.py",
           "    check_packs(store, prefix, (one for index in indexes for one in needed_bytes(index)), there.sizes)\n", ""),
    Mutant("a claim of somebody else is ours", f"{_C}/root_records.py",
           "return _read_claim(store, _claim_key(claim.number)).token == claim.token", "return True"),
    Mutant("a lost answer of a claim is a refusal", f"{_C}/root_records.py",
           "        won = owns_generation(store, claim)\n    if won:", "        won = False\n    if won:"),
    Mutant("the fence ignores newer generations", f"{_C}/root_records.py",
           "if (newest := max(claimed, default=0)) > claim.number:", "if (newest := 0) > claim.number:"),
    Mutant("an intent is never closed or swept", f"{_C}/sweeping.py",
           "store.delete_many([info.key for info in store.list(INTENTS) if _is_decided(info.key, newest)])", "pass"),
    # retention
    Mutant("data before its tombstone", f"{_C}/retention.py",
           "        batch = _bury(store, names, claimed, now)\n    data = data_of(store, batch)\n",
           "        store.delete_many([e.key for e in data_of(store, batch)])\n        batch = _bury(store, names, "
           "claimed, now)\n    data = data_of(store, batch)\n"),
    Mutant("a keep mark that comes late is not seen", f"{_C}/retention.py",
           "claimed = _claim(store, batch, now)", "claimed = batch"),
    Mutant("a keep mark is given in spite of a deletion", f"{_C}/retention.py",
           "if not is_new and is_tombstone(store, KEEP + prefix):", "if not is_new and False:"),
    Mutant("a generation that begins while retention works is not seen", f"{_C}/retention.py",
           "if newest is not None and newest_claim(store) > newest:", "if False:"),
    Mutant("retention keeps one less", f"{_C}/retention.py",
           "last = max(1, policy.keep_last)", "last = max(1, policy.keep_last - 1)"),
    Mutant("retention counts what was rolled back", f"{_C}/retention.py",
           "abandoned = {info.identity for info in infos if is_rolled_back(info.identity, generations)}", "abandoned = set()"),
    Mutant("retention ignores keep_every", f"{_C}/retention.py",
           "or every or info.prefix in kept", "or info.prefix in kept"),
    Mutant("retention ignores keep marks", f"{_C}/retention.py",
           "or info.prefix in kept or info.prefix in leased:", "or info.prefix in leased:"),
    Mutant("retention counts damaged checkpoints", f"{_C}/retention.py",
           "infos = [info for info in infos if info.prefix not in bad]", "pass"),
    Mutant("a sweep takes what is being written", f"{_C}/sweeping.py",
           "return not folder.is_deleted and newest is not None and identity < newest and folder.age_s >= older_than_s",
           "return not folder.is_deleted"),
    Mutant("orphans stay for ever", f"{_C}/sweeping.py",
           "orphans = [one for one in folders if _is_orphan(one, newest, older_than_s)]", "orphans = []"),
    Mutant("segments in use are retired", f"{_P}/retire.py",
           "all(held.header.generation < record.number and held.header.identity < newest for held in group)",
           "all(held.header.identity <= newest for held in group)"),
    # what the simulation found first
    Mutant("what a restore emptied stays held", f"{_P}/seeker.py",
           "if not is_to_come:", "if seen is None or seen.holders(self._held):"),
    Mutant("a proposal is numbered by a listing that lags", f"{_C}/intents.py",
           "1 + max([last, *map(_number, before)])", "1 + max([-1, *map(_number, before)])"),
    Mutant("an intent of others is abandoned without a look at the fence", f"{_P}/negotiation.py",
           "if self._fenced != tick.generation.number:",
           "if self._fenced != tick.generation.number and not is_rolled_back(intent.identity, [tick.generation]):"),
    # replicas
    Mutant("replica: of another run", f"{_R}/slots.py", "return header.is_complete and not is_other", "return header.is_complete"),
    Mutant("replica: what is kept gives way", f"{_R}/slots.py",
           "newer = {i for i in complete if kept is None or i > kept}", "newer = set(complete)"),
    Mutant("replica: complete before all of it is there", f"{_R}/slots.py",
           '        if not self.arrived.all():\n            return False\n        crash_point("replica.before-complete")\n', ""),
    Mutant("replica: what some nodes hold is everywhere", f"{_R}/replica_rounds.py",
           "return set.intersection(*map(set, found))", "return set.union(*map(set, found))"),
    Mutant("replica: held by some partner", f"{_R}/round_memory.py",
           "intersection(pinned, *(partner.holds or () for partner in partners))",
           "intersection(pinned, [i for partner in partners for i in partner.holds or ()])"),
    Mutant("the status says what is only decided", f"{_P}/service.py",
           "            committed=persisting.committed,\n", "            committed=persisting.committed and persisting.floor,\n"),
]  # fmt: skip


DEFENDED = {
    "a pin is not checked again under its lock": "what is read from it is compared with manifest and digests",
    "agreement: urgent takes what one node holds": "the nodes that lack it abandon the intent",
    "agreement: part of the world is enough": "the same: all ranks are its writers",
    "an intent of a rolled-back lineage is joined": "its slots are emptied, and it is looked at again before the commit",
    "a dead relay is believed for ever": "without a decision the root is asked after 5 s",
    "a rank that has not published counts": "what it holds is empty until then, so that nothing is common",
    "rolled-back snapshots are acknowledged": "their slots are emptied before a rank publishes",
    "the header says WRITING in neither copy": "what is common is never written over, and all that is read is compared with digests",
    "the lease is not waited for": "MANIFEST is created once, whoever tries",
    "commit without all indexes": "the commit reads every index, and fails without one",
    "a failed write counts as finished": "its index is missing: the intent is given up, and a newer snapshot is persisted",
    "a digest is not checked while packs are written": "what is pinned is not overwritten",
    "a snapshot that was overwritten is persisted": "the same",
}
"""Planted bugs that something else in the product makes harmless, so that no rule can see them: what that is."""
OFTEN: dict[str, tuple[str, ...]] = {
    "suspect": ("poison", "kill rank", "lose node"),
    "what was restored": ("lose node", "kill rank", "cut from root"),
    "rolled back: ": ("roll back", "kill rank", "lose node", "poison"),
    "a round that was missed": ("kill agent", "kill rank", "cut from root", "restart node"),
    "a candidate is not unpinned": ("storage is gone", "storage refuses", "cut from root"),
    "slots are not looked at": ("storage is slow", "kill persister"),
    "commit is reported": ("storage forgets", "pause persister", "kill persister at a point"),
    "other writers are": ("lose node", "lose node for good", "kill persister at a point"),
    "overtaken claims": ("others take over", "kill rank"),
    "attempts before a pause": ("operator truncates", "storage is gone", "operator damages"),
    "MANIFEST is written over": ("pause persister", "storage forgets", "storage lies", "kill persister at a point"),
    "packs are not looked at": ("operator damages", "operator deletes", "slow node", "pause persister"),
    "replica: ": ("lose node", "kill persister", "cut between nodes", "kill rank"),
    "keep mark": ("keep mark", "kill rank"),
}
"""Faults that a bug whose name contains this has to do with: others are left out of its seeds."""
BUSY: dict[str, object] = {"step_s": 1.0, "persist_every": 2, "faults_s": 40.0}
"""A job in which much happens in little time: many seeds of it are run sooner than one long one."""
LONGER = BUSY | {"faults_s": 150.0}
REPLICATED: dict[str, object] = {"nodes": 3, "per_node": 1, "slots": 4, "replicate": 2}


def mutated(mutant: Mutant) -> str:
    """Return the text of its file with the bug in it."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.before)} such places in {mutant.file}")
    return text.replace(mutant.before, mutant.after)


def plant(mutant: Mutant) -> None:
    """Have the module that is imported later carry the bug."""
    text, original = mutated(mutant), SourceFileLoader.get_code
    path = (ROOT / mutant.file).resolve()

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if os.path.realpath(self.path) == str(path):
            return compile(text, self.path, "exec")
        return original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def hunt(mutant: Mutant, seeds: int, seconds: float) -> str:
    """Plant it here, and return what found it: one of the named seeds, or of new ones."""
    plant(mutant)
    from simulation.plan import draw
    from simulation.run import simulate
    from simulation.seeds import SEEDS

    end = time.process_time() + seconds
    often = next((kinds for word, kinds in OFTEN.items() if word in mutant.name), ())
    fixed = REPLICATED if often in (OFTEN["replica: "], OFTEN["what was restored"]) else {}
    kinds = (LONGER | fixed, BUSY | fixed)
    new = ((str(seed), (seed, *draw(seed, often, **kinds[seed % 2]))) for seed in range(1, seeds + 1))
    known = ((f"named {at}", (one.seed, one.setup, one.faults)) for at, one in enumerate(SEEDS, start=1))
    for name, story in chain(new, known) if often else chain(known, new):
        try:
            outcome = simulate(*story)
        except BaseException as error:  # noqa: BLE001 -- a crash of the product's loop is a find, too
            return f"{name}\t{type(error).__name__}: {error}"
        if outcome.rule:
            return f"{name}\t{outcome.problem}"
        if time.process_time() > end:
            return f"-\tnot in {name} seeds"
    return f"-\tnot in {seeds} seeds"


def side_by_side(hunted: Sequence[Mutant], workers: int, **limits: float) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with the answer of `hunt`, from a process of its own, which may die of the bug."""
    context, todo = get_context("fork"), deque(hunted)
    running: dict[Any, tuple[Mutant, Any]] = {}
    while todo or running:
        while todo and len(running) < workers:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(there, todo[0], limits))
            process.start()
            there.close()
            running[here] = todo.popleft(), process
        said: Any
        for said in wait([*running]):
            mutant, process = running.pop(said)
            try:
                answer = said.recv_bytes().decode()
            except EOFError:
                answer = "?\tthe process died"
            process.join()
            yield mutant, answer


def _answer(there: Any, mutant: Mutant, limits: dict[str, Any]) -> None:
    there.send_bytes(hunt(mutant, **limits).encode())


def main(arguments: list[str]) -> int:
    """Hunt all of them, or those whose name contains a word; the exit code is the number of those that got away."""
    parser = argparse.ArgumentParser(prog="simulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="of a processor, for each")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    chosen = parser.parse_args(arguments)
    import torch  # noqa: F401 -- once, before the processes fork: it takes longer than many seeds

    hunted = [one for one in MUTANTS if chosen.only in one.name]
    missed, found = 0, 0
    limits = {"seeds": chosen.seeds, "seconds": chosen.seconds}
    for mutant, answer in side_by_side(hunted, chosen.workers, **limits):
        seed, _, text = answer.partition("\t")
        found += seed != "-"
        missed += seed == "-" and mutant.name not in DEFENDED
        text = f"{text}; {DEFENDED[mutant.name]}" if seed == "-" and mutant.name in DEFENDED else text
        sys.stdout.write(f"{mutant.name:55} seed {seed:>8}  {text.splitlines()[0][:110]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{found} of {len(hunted)} were found; of the others {missed} are not known to be harmless\n")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
