"""Replicas of a node's memory in that of its partners, from persister to persister, beside training.

In: the slots of this node, pinned; the session's record of nodes, partners and rows. Out: replica segments in the partners'
job directories, which a restore reads like any other. May import core, native, planning and shm; no torch.
"""
