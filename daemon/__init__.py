"""Programs for `python -m`: dlrun, a rendezvous store."""

if not __name__.startswith("flashckpt."):  # a bare `import daemon` would make a second copy of every class
    raise ImportError(f"import this package as flashckpt.daemon, not as {__name__!r}")
