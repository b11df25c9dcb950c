"""Live state copied into a slot during training.

In: a structure and the live tensors. Out: COMPLETE slots, or a discarded snapshot and why.
"""
