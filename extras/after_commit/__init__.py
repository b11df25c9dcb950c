"""Exports and copies of checkpoints beside training, after commits. Torch-free.

In: `FLASHCKPT_AFTER_COMMIT`, commits, and keep marks of the root. Out: folders of safetensors and checkpoints of other roots,
each whole or not there. One process of the lowest priority makes them, which the persister of the first node starts.
"""
