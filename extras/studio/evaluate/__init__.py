"""Scores of a trained state; a layout against one process.

In: a configuration, a model. Out: losses.
"""
