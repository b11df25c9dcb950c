"""Replicas of a node's memory in that of its partners.

In: the slots of this node, pinned; the session's record of nodes, partners and rows. Out: replica segments in the partners'
job directories, which a restore reads like any other. No torch.
"""
