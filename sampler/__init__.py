"""flashckpt.sampler: see ARCHITECTURE.md for where it stands among the other parts."""

if not __name__.startswith("flashckpt."):  # a bare `import sampler` would make a second copy of every class
    msg = f"import this package as flashckpt.sampler, not as {__name__!r}"
    raise ImportError(msg)
