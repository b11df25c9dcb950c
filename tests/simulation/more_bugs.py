"""Bugs that were planted in places which no rule had been written for: a third look, as somebody else would plant them."""

from __future__ import annotations

from simulation.bugs import REPLICATED, Hunt, Mutant

_R, _V = "extras/replicas", "flashckpt/restore"
_P, _C, _S, _L = "daemon/persister", "flashckpt/checkpoint", "flashckpt/shm", "flashckpt/planning"
MORE = [
    # negotiation and commit
    Mutant("a proposal left behind by an early look counts", f"{_P}/agreement.py",
           "for proposal, ranks in records if not is_replaced(ranks)]", "for proposal, ranks in records]"),
    Mutant("proposals in another generation count", f"{_P}/negotiation.py",
           "for one in received if one.proposes_in == generation]", "for one in received]"),
    Mutant("slots stay pinned while storage fails", f"{_P}/negotiation.py",
           "or not 0 < event.node.least_slots <= MIN_SLOTS\n", "or True\n"),
    Mutant("what the ranks carry is trusted for ever", f"{_P}/messaging.py",
           "elif tick.now_s - self._waiting_s > PATIENCE_S:", "elif False:"),
    Mutant("no fence before a commit", f"{_P}/persist.py",
           "        yield p.CheckFence()\n        is_over", "        is_over"),
    Mutant("an open intent that was rolled back goes on", f"{_P}/persist.py",
           "is_over = is_rolled_back(identity, [tick.generation])", "is_over = False"),
    Mutant("a lease is never renewed", f"{_P}/persist.py",
           "if self.held is not None and now_s - self.renewed_s < self.expires_s / RENEWALS:", "if self.held is not None:"),
    Mutant("the slots of an intent are not let go", f"{_P}/flush.py",
           "        self._pool.shutdown()\n        release(self.pins)\n", "        self._pool.shutdown()\n"),
    Mutant("whose number an earlier generation has is not asked", f"{_P}/coordinator.py",
           "if number == record.number else claimed_token(store, number)", 'if number == record.number else ""'),
    Mutant("attempts are counted anew for each intent", f"{_P}/negotiation.py",
           "attempts = self._tried[1] if self._tried[0] == intent.identity else 0", "attempts = 0"),
    Mutant("segments that are owned or read are retired", f"{_P}/retire.py",
           "if segment.is_owned or segment.busy():", "if False:"),
    Mutant("nobody follows to what others persist in place of a skipped step", f"{_P}/negotiation.py",
           "asked = {*self._marked(node), *(one.pinned for one in self._heard)}", "asked = {*self._marked(node)}"),
    # acknowledgements and memory
    Mutant("what is still open is lacked", f"{_S}/acks.py",
           "if identity in self.common or identity in self.open:", "if identity in self.common:"),
    Mutant("messages of another generation are received", f"{_S}/messages.py",
           "        if number != generation or digest_of(memoryview(raw)[16:]) != seal_:\n            return None\n        silent",
           "        if digest_of(memoryview(raw)[16:]) != seal_:\n            return None\n        silent"),
    # lineage and start
    Mutant("a claim has no parent", f"{_V}/gather.py",
           "wanted = Generation(number=number, token=token, parent=parent, world_size=world.size)",
           "wanted = Generation(number=number, token=token, parent=None, world_size=world.size)"),
    Mutant("a start that dies in its claim leaves no note", f"{_V}/gather.py",
           "        (directory.path / CLAIMS).touch()\n", "        pass\n"),
    Mutant("slots of another generation of that number count", f"{_L}/selection.py",
           "records = [one for one in records if one.mark in (0, marks.get(one.generation))]", "pass"),
    Mutant("a parent that only the root knows is forgotten", f"{_L}/selection.py",
           "parents[one.number] = one.parent if one.parent is not None else parents.get(one.number)",
           "parents[one.number] = one.parent"),
    # root
    Mutant("a reader that comes late keeps nothing", f"{_C}/retention.py",
           "    held = leased_prefixes(store, now_s=now)\n", "    held = set[str]()\n"),
    Mutant("an orphan that was just committed is swept", f"{_C}/sweeping.py",
           "return [one for one, is_ours in zip(orphans, won, strict=True) if is_ours]", "return orphans"),
    Mutant("a sweep does not look for open intents", f"{_C}/sweeping.py",
           "busy = leased | {prefix_of(*intent.identity) for intent in list_intents(store)}", "busy = leased"),
    # what ends
    Mutant("a job that ends does not wait for its last commit", f"{_P}/service.py",
           "            if idle and not alive:\n", "            if not alive:\n"),
    Mutant("room is made of what is kept", f"{_C}/sweeping.py",
           "pruned = prune(store, policy, now_s=now)", "pruned = prune(store, Policy(keep_last=1), now_s=now)"),
    Mutant("room is made of what is being written", f"{_C}/sweeping.py",
           "if not one.is_deleted and one.prefix in given_up], now)", "if not one.is_deleted], now)"),
    Mutant("a damaged record takes any claim in its place", f"{_V}/gather.py",
           "if newest is not None and ran == {newest.number}:", "if newest is not None:"),
    # agents, data, replicas
    Mutant("each failure is the farthest so far", "daemon/launcher/budget.py",
           "self._highest = max(self._highest, step)", "self._highest = step"),
    Mutant("a position in the data is one sample further", "sampler/order/cursor.py",
           "self.settle(state.epoch * self.length + state.offset)", "self.settle(state.epoch * self.length + state.offset + 1)"),
    Mutant("replica: what was kept before is forgotten", f"{_R}/replica_rounds.py",
           "kept = newest([before.kept, *(report.kept for report in there)])", "kept = newest(report.kept for report in there)"),
    Mutant("replica: what is in doubt is overwritten", f"{_R}/replica_rounds.py",
           "elif doubt is not None and doubt != kept:", "elif False:"),
    Mutant("replica: of another generation is accepted", f"{_R}/receiver.py",
           "generation != session.generation or", "False or"),
]  # fmt: skip
"""Replacements, as in `bugs`."""
MORE_HUNTS = {
    "left behind by an early look": Hunt(("kill persister", "restart node", "resize"), {"nodes": 3, "per_node": 2}),
    "proposals in another": Hunt(("step back", "kill rank", "slow node"), {"nodes": 3, "per_node": 1}),
    "trusted for ever": Hunt(("cut deaf", "cut between nodes", "cut one way"), {"nodes": 3, "per_node": 1}),
    "never renewed": Hunt(("writers are late",), {"nodes": 3, "per_node": 1, "latency_s": 0.02, "discards": 0.0}),
    "owned or read are retired": Hunt(("resize", "kill rank", "restart node"), {"nodes": 3, "per_node": 1}),
    "nobody follows": Hunt(("slow node",), {"nodes": 3, "per_node": 1, "discards": 0.1}),
    "messages of another": Hunt(("messages come twice", "kill rank", "cut deaf"), {"nodes": 3, "per_node": 1}),
    "only the root knows": Hunt(("step back", "lose node", "hang agent", "restart all nodes"), {"nodes": 2}),
    "a job that ends": Hunt(("job ends",), {"nodes": 2, "per_node": 1}),
    "room is made of what is kept": Hunt(("storage fills",), {"keep_last": 3}),
    "room is made of what is being": Hunt(("storage fills", "slow node"), {"nodes": 3, "per_node": 1}),
    "a damaged record": Hunt(("generation is damaged", "other job", "kill rank")),
    "in its claim leaves no note": Hunt(("die in a restore", "other job in a restore", "kill rank"), {"votes": True}),
    "a claim has no parent": Hunt(("step back", "lose all nodes"), {"keep_last": None}),
    "no fence before a commit": Hunt(("others take over", "step back", "slow node", "hang node"), {"spares": 2}),
    "an open intent that was rolled back": Hunt(("step back", "slow node", "storage is slow"), {"persist_every": 5}),
    "slots stay pinned": Hunt(("storage is gone",), {"slots": 2, "per_node": 1}),
    "a reader that comes late": Hunt(("slow reader",), {"keep_last": 1, "latency_s": 0.15}),
    "an orphan that was just": Hunt(
        ("operator sweeps", "slow node", "hang node at a point"), {"nodes": 3, "per_node": 1}
    ),
    "open intents": Hunt(("operator sweeps", "slow node", "storage is slow"), {"nodes": 3, "per_node": 1}),
    "replica: what was kept": Hunt(("lose node", "kill persister", "cut between nodes"), REPLICATED),
    "replica: ": Hunt(("lose node", "kill persister", "cut one way", "restart node"), REPLICATED),
    "each failure is": Hunt(
        ("kill rank", "step back"), {"nodes": 1, "per_node": 1, "faults_s": 300.0, "persist_every": 12}
    ),
}
"""As `bugs.HUNTS`."""
