"""flashckpt.daemon: see ARCHITECTURE.md for where it stands among the other parts."""

if not __name__.startswith("flashckpt."):  # a bare `import daemon` would make a second copy of every class
    raise ImportError(f"import this package as flashckpt.daemon, not as {__name__!r}")
