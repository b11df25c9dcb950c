"""Arithmetic of a run: bytes, FLOPs, bytes on the wire, idle shares, times, and `plan`, which prints them and ranks layouts.

In: a configuration, a number of GPUs and what they can do. Out: a document, a configuration to paste, a line at each start.
Pure and torch-free but for `measure`. May import: configuration, layouts, `flashckpt.plan`.
"""
