"""Tracked objects as named tensors with boxes, and values.

In: modules, optimizers, samplers, generators. Out: the structure of the state, and its current values.
"""
