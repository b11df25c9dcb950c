"""The corpus of a run: fetched, tokenized, cut into windows.

In: a configuration. Out: datasets and samplers.
"""
