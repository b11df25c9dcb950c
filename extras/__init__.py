"""Rooms that a training run does not need, under the import paths that links in flashckpt/ and trainer/ give them."""

raise ImportError(f"import these packages as flashckpt.NAME, as ARCHITECTURE.md lists them, not as {__name__!r}")
