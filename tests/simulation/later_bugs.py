"""Bugs of the same kinds in other lines: a fourth look, planted before anybody thought of a rule or a fault for one of them."""

from __future__ import annotations

from simulation.bugs import REPLICATED, Hunt, Mutant

_R, _V = "extras/replicas", "flashckpt/restore"
_P, _C, _S, _L = "daemon/persister", "flashckpt/checkpoint", "flashckpt/shm", "flashckpt/planning"
LATER = [
    # negotiation, messages, commit, lease, fence, intents
    Mutant("what others search is not waited for", f"{_P}/negotiation.py",
           "max(one.at_least, one.pinned or NOTHING) > max(self.floor, NOTHING)",
           "(one.pinned or NOTHING) > max(self.floor, NOTHING)"),
    Mutant("of several open intents the oldest is joined", f"{_C}/intents.py",
           "return sorted(found, key=lambda intent: intent.identity, reverse=True), marked",
           "return sorted(found, key=lambda intent: intent.identity), marked"),
    Mutant("what was damaged on storage is not written again", f"{_P}/persist.py",
           "                self.left, self.written_s = self.pinned, None\n", "                pass\n"),
    Mutant("the oldest lease counts", f"{_C}/intents.py",
           "newest = max(found, key=lambda info: info.key)", "newest = min(found, key=lambda info: info.key)"),
    Mutant("a claim that another run took is not lost", f"{_C}/root_records.py",
           "    if not claim_generation(store, claim):\n        raise _fenced(", "    if False:\n        raise _fenced("),
    Mutant("whom a late claim came behind is forgotten", f"{_V}/gather.py",
           "line = () if claimed else found.line", "line = ()"),
    # retention, sweeping, tombstones
    Mutant("retention keeps one more than asked for", f"{_C}/retention.py",
           "is_kept = place < last or", "is_kept = place <= last or"),
    Mutant("what is suspect takes the place of what is clean", f"{_C}/retention.py",
           "clean += not info.suspects", "clean += 1"),
    Mutant("a tombstone goes at once", f"{_C}/sweeping.py",
           "if one.is_deleted and one.age_s > TOMBSTONE_AGE_S}", "if one.is_deleted}"),
    Mutant("what was swept may be committed", f"{_C}/writer.py",
           "        if start.startswith(TOMBSTONE):\n", "        if False:\n"),
    # slots, acknowledgements, relays
    Mutant("what can never become common keeps its slot", f"{_S}/acks.py",
           "            or identity in unrecoverable\n", ""),
    Mutant("what a list has no room for is lacked", f"{_S}/acks.py",
           "self.listed_above < identity <= self.low_watermark", "identity <= self.low_watermark"),
    Mutant("what some nodes have published is the job's", f"{_S}/ack_relay.py",
           "job = GroupAcks(is_whole=whole.is_whole,", "job = GroupAcks(is_whole=True,"),
    # restore, votes, digests
    Mutant("slots of a generation that lost its number stay", f"{_L}/selection.py",
           "mark in found_ - {marks[number]})", "mark in set[int]())"),
    Mutant("a restore compares no digests", f"{_V}/sources.py",
           "    if len(wrong := np.flatnonzero(actual != expected)):\n", "    if len(wrong := np.flatnonzero([False])):\n"),
    Mutant("who lacks something need not be asked", f"{_V}/votes.py",
           "return CandidateState.LACKING in states and CandidateState.REJECTED not in states",
           "return states == {CandidateState.LACKING}"),
    # replicas, rounds, data
    Mutant("replica: what is sent need not stay", f"{_R}/round_memory.py",
           "identity in (self.mark if is_needed else None, self.kept)", "identity in (self.kept,)"),
    Mutant("replica: what is newer than what is kept may not go", f"{_R}/slots.py",
           "unrecoverable=newer | left,", "unrecoverable=left,"),
    Mutant("who trained has no precedence", "daemon/launcher/unit_rounds.py",
           "if not self._state.complete and self.has_trained:", "if False:"),
    Mutant("an epoch ends one sample late", "sampler/order/cursor.py",
           "return (position // self.length + 1) * self.length", "return (position // self.length + 1) * self.length + 1"),
    # what only an emptied root, a large job, the same failure again, or a partner without room shows
    Mutant("root: that it was emptied is told nobody", f"{_V}/coordinator.py",
           "if (missing := missing_on_root(inventories, root, found)) is not None:", "if False:"),
    Mutant("root: the next persister forgets what was committed", f"{_P}/service.py",
           "once_committed=persisting.committed or self._known,", "once_committed=persisting.committed,"),
    Mutant("root: one that was emptied is refused for ever", f"{_C}/root_records.py",
           "        self._was_refused = True\n", "        pass\n"),
    Mutant("root: what was removed from it is waited for", f"{_P}/persist.py",
           "            patience_s = EARLIER_PATIENCE_S\n", "            pass\n"),
    Mutant("large: packs are not looked at", f"{_C}/merging.py", "    check_packs(store, prefix, needs, there.sizes)\n", ""),
    Mutant("large: an index of another run is taken", f"{_C}/merging.py",
           "rows=False):\n        _refuse_other(prefix, index, token)\n", "rows=False):\n"),
    Mutant("again: to the same state again", f"{_L}/selection.py",
           "older = [i for i in wanted if i < began]", "older = [i for i in wanted if i <= began]"),
    Mutant("again: without end", "daemon/launcher/budget.py", "        if taken >= limit:\n", "        if False:\n"),
    Mutant("again: one sample more is left out", "sampler/sampler.py",
           "            self.skip(begin, end)\n", "            self.skip(begin, end + 1)\n"),
    Mutant("replica: a partner without a slot is taken for one that has it", f"{_R}/sender.py",
           'if answer["state"] == "busy" else RETRY_S[1])\n                return False',
           'if answer["state"] == "busy" else RETRY_S[1])\n                return True'),
]  # fmt: skip
"""Replacements, as in `bugs`."""
LATER_HUNTS = {
    "root: ": Hunt(("root is emptied",), {"votes": True, "nodes": 2, "persist_every": 20}),
    "large: packs": Hunt(("storage loses a part", "slow node"), {"spread": True, "nodes": 3}),
    "large: ": Hunt(("others take over", "cut from root", "kill rank"), {"spread": True, "nodes": 2, "spares": 2}),
    "again: ": Hunt(("a step fails",), {"votes": True, "persist_every": 5}),
    "without a slot": Hunt(("replica slots are held", "lose node"), REPLICATED),
}
"""As `bugs.HUNTS`."""
