"""flashckpt.trainer: see ARCHITECTURE.md for where it stands among the other parts."""

if not __name__.startswith("flashckpt."):  # a bare `import trainer` would make a second copy of every class
    raise ImportError(f"import this package as flashckpt.trainer, not as {__name__!r}")
