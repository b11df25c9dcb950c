"""Places where checkpoints live: one interface, one backend per kind of storage.

In: a URL, keys and bytes. Out: objects written whole, read by range, listed and removed.
May import: errors; no torch.
"""
