"""Values and byte formats of snapshots and checkpoints. Pure.

In: bytes and numbers. Out: manifests, tables, headers and digests, checked.
No torch, no I/O.
"""
