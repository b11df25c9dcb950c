"""Values and byte formats of snapshots and checkpoints. Pure.

In: bytes and numbers. Out: manifests, tables, headers and digests, checked.
May import: errors; no torch, no I/O.
"""
