"""Decisions: who writes what, what is read from where. Pure.

In: tables, inventories and root summaries. Out: write partitions, packs, read plans, candidates.
No torch, no I/O.
"""
