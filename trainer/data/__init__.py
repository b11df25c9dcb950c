"""Prepared tokens of a run, read as windows.

In: a configuration. Out: datasets and samplers.
"""
