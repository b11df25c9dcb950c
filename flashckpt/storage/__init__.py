"""Where checkpoints live: one interface, many backends.

In: a URL, keys and bytes. Out: objects written whole, read by range, listed and removed.
No torch.
"""
