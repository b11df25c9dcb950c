"""Checkpoints on storage: packs, MANIFEST, retention.

In: pinned slots and a store. Out: committed checkpoints, and what a root holds.
No torch.
"""
