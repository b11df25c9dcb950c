"""Bytes, FLOPs and times of a run, by arithmetic: `plan`.

In: a configuration, a number of GPUs and what they can do. Out: a document, a configuration to paste, a line at each start.
Pure and torch-free but for `measure`.
"""
