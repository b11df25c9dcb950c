"""The objects a user tracks, as tensors with global names and boxes, and values beside them.

In: modules, optimizers, samplers, generators. Out: the structure of the state, and its current values.
May import: core, planning.
"""
