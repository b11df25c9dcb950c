"""The daemon of one job on one node: it persists some of the snapshots and commits checkpoints.

In: slots of the node, requests, the other nodes' records on the root. Out: committed checkpoints, the job's status, metrics.
May import: the engine's core, planning, shm, storage, checkpoint, and machine; no torch.
"""
