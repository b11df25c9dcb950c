"""Named crash points: the places where a test kills the process with SIGKILL.

Every write whose intermediate state could be observed has a point before and after it. A test
enumerates `CRASH_POINTS`, so every new point must be covered by a test that kills there. In production
`crash_point` costs one comparison with None.

Set FLASHCKPT_CRASH_AT=name (first time), name:3 (third time) or name:3:rank5 (third time, rank 5
only) to kill the process there.
"""

from __future__ import annotations

import os
import signal

from flashckpt.environment import env

CRASH_POINTS: dict[str, str] = {
    # memory tier, writer (training process)
    "slot.before-writing": "lease taken, header still old",
    "slot.after-writing": "header says WRITING, no byte copied",
    "slot.during-copy": "some chunks copied",
    "follow.after-part": "bytes that the persister gave back overwritten, the rest of the slot still being persisted",
    "slot.before-manifest": "all chunks copied, manifest area still old",
    "slot.before-complete": "manifest written, header still WRITING",
    "slot.after-complete": "header says COMPLETE",
    # acknowledgements, of a rank and of all: from rows to the node's record, the job's record, the control pages
    "acks.during-list": "pairs of a list in the control file written, its digest still of the list before",
    "acks.before-node": "lists of the node's ranks combined, its record not in the store",
    "acks.before-job": "records of all nodes combined, the job's record not in the store",
    "acks.before-delivery": "messages of other persisters read, not written for this node's",
    "messages.before-rename": "a message of persisters written under the temporary name, the one before it still there",
    "messages.after-rename": "the message has its name, nobody was woken",
    "acks.before-page": "the job's record read, not in the control page",
    "acks.after-page": "the job's record in the control page",
    # segment creation
    "segment.before-reserve": "file exists, no superblock",
    "segment.before-rename": "superblock written under the temporary name",
    "segment.after-rename": "the segment has its name, and the temporary one still",
    # the readers, that is restore
    "opening.after-named": "the agent knows where its ranks are about to begin, and may have started a persister there; nothing restored",
    "restore.before-read": "restore point chosen, nothing read",
    "restore.during-read": "some ranges copied into live state",
    "restore.before-lineage": "state read, rolled-back slots not yet marked",
    "restore.after-lineage": "rolled-back slots marked",
    # the exchange with other nodes
    "shared.before-send": "a range of a checkpoint was read or received, it has not been sent on",
    "shared.after-batch": "some ranges were sent on, none of them is in live state",
    "peers.before-round": "another round of ranges is due, none of it requested yet",
    "peers.while-serving": "ranges were requested, none has left its slot",
    "peers.after-round": "ranges have arrived, none is in live state",
    # replicas in a partner's memory: the sender, the receiver
    "replica.before-offer": "target pinned, its manifest not yet offered to the partner",
    "replica.during-send": "some chunks sent",
    "replica.after-begin": "receiver: header says WRITING, no chunk arrived",
    "replica.during-receive": "receiver: some chunks in the slot",
    "replica.before-complete": "receiver: all chunks in the slot and verified, header still WRITING",
    "replica.after-complete": "receiver: header says COMPLETE, the sender has not heard of it",
    # generation claim
    "generation.before-claim": "number chosen, nothing written",
    "generation.after-claim": "number claimed on the root, not known to the node",
    # dlrun's agent: ranks from standby processes
    "standby.before-go": "standby processes were asked and have answered, none of them is a rank",
    "standby.after-go": "standby processes run the script, their agent has not noted them as its workers",
    "expect.before-persister": "a place made for a job that other nodes train, no persister there",
    "incident.before-rename": "report of an incident written, not under its name",
    # daemon
    "persist.before-intent": "candidate pinned, intent not written",
    "persist.after-intent": "intent written, no data",
    "persist.during-pack": "part of a pack written, or the packs of some of the ranks that share an object",
    "persist.after-pack": "a pack durable, with two slots its bytes given back to training, others not written",
    "persist.before-index": "packs durable, index not written",
    "ranges.before-put": "packs durable, values of single ranks and index not written",
    "lease.before-take": "all slots of the node written, nobody commits yet",
    "lease.after-take": "this node is the one that commits, and has not looked for the other indexes",
    "persist.before-manifest": "index durable, MANIFEST not written",
    "persist.after-manifest": "MANIFEST committed, slot still pinned",
    "persist.before-prune": "commit done, nothing pruned",
    "persist.after-claim": "an old checkpoint can no longer be marked to be kept, nothing of it deleted",
    "persist.before-tombstone": "catalogue entry of an old checkpoint deleted, its MANIFEST still there",
    "persist.during-prune": "MANIFEST of an old checkpoint deleted, its data still there",
    "persist.after-prune": "data of an old checkpoint deleted, not yet noted in the catalogue",
    "history.before-put": "the record of the session not yet in place of the one before",
    # room on a root that is full
    "room.after-abandoned": "data of abandoned snapshots deleted, not yet noted in the catalogue",
    "room.before-retry": "room made, the pack that did not fit not yet written again",
    # the sweep of a root
    "sweep.before-entries": "data of orphans deleted, not yet noted in the catalogue",
    "sweep.before-tombstones": "catalogue entries of old tombstones deleted, the tombstones still there",
    # a save without slots: dcp, import
    "save.during-pack": "part of a pack written",
    "save.before-index": "packs durable, index not written",
    "save.before-commit": "all indexes durable, MANIFEST not written",
    # a folder of files that another library writes
    "folder.after-part": "part of a file durable, the file not there",
    "folder.before-commit": "all files durable under the temporary name, the folder not there",
    "folder.after-commit": "the folder is there, files still have the temporary name too",
    "folder.during-removal": "the folder is gone, its data still there",
    "mark.after-name": "a name given to another checkpoint, the one before has it still",
    # a copy of a checkpoint to another root
    "copy.during-pack": "part of a pack of the copy written",
    "copy.after-index": "all packs of the copy and one of its indexes durable, its MANIFEST not written",
    "copy.before-manifest": "all packs of the copy durable, its MANIFEST not written",
    "copy.after-manifest": "MANIFEST of the copy written, LATEST not",
    "export.before-rename": "everything durable under the temporary name",
    "export.exchanged": "the new folder has the name, the old one the temporary name",
    "export.between-renames": "the old folder is aside, the new one still has the temporary name",
    "after-commit.before-report": "an export or a copy beside training is there, the persister has not heard of it",
    "removal.renamed": "a checkpoint in a folder has a temporary name, nothing of it deleted",
    "examples.before-link": "the example durable under a temporary name",
    "sample.before-rename": "a sample of a loader in memory under a temporary name, not under its own",
    # trainer: a synchronisation of groups that are separate runs
    "groups.before-here": "a group has trained its interval, and the others do not know it",
    "groups.after-roster": "decided who takes part, nothing exchanged",
    "groups.during-exchange": "some of the weights exchanged",
    "groups.before-outcome": "all exchanged and nothing changed, whether it counts not yet on storage",
    "groups.after-outcome": "the synchronisation counts, weights are still those from before it",
    # trainer: preparing the corpus
    "corpus.before-index": "all token files written, index.json not written",
    "prepare.before-tokenizer": "a tokenizer trained, under its temporary name",
    "prepare.during-part": "some documents of a part written, under temporary names",
    "prepare.before-record": "shards of a part durable, its record not written",
    "prepare.before-index": "all parts recorded, index of an earlier preparation or none",
    # every object a directory store publishes
    "store.before-publish": "temporary file durable, not yet under its name",
    "store.after-publish": "object under its name, directory not yet synced",
}

_armed: str | None = env.FLASHCKPT_CRASH_AT or None
_hits = 0


def arm(spec: str | None) -> None:
    """Set the crash point of this process (tests that fork use this instead of the environment)."""
    global _armed, _hits
    _armed, _hits = spec, 0


def crash_point(name: str) -> None:
    """Kill this process with SIGKILL if `name` is the armed crash point; do nothing otherwise."""
    if _armed is None:
        return
    wanted, _, rest = _armed.partition(":")
    if wanted not in CRASH_POINTS or name not in CRASH_POINTS:
        raise ValueError(f"unknown crash point {wanted if wanted not in CRASH_POINTS else name!r}")
    count, _, where = rest.partition(":")
    if name != wanted or (where and where != f"rank{env.RANK}"):
        return
    global _hits  # noqa: PLW0603
    _hits += 1
    if _hits == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def is_armed(name: str) -> bool:
    """Return whether this process is to be killed at a point: work of one call is then done in steps, with the point in between."""
    return _armed is not None and _armed.partition(":")[0] == name
