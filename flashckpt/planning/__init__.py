"""The algorithms that decide: who writes which part, which bytes are read from where, what is restored. Pure.

In: tables, inventories and root summaries. Out: write partitions, packs, read plans, candidates.
May import: core; no torch, no I/O.
"""
