"""Persists snapshots, commits checkpoints: one per node.

In: slots of the node, requests, the other nodes' records on the root. Out: committed checkpoints, the job's status, metrics.
No torch.
"""
