"""A 3D-parallel trainer of transformers: its command line.

In: a command line. Out: an exit code.
"""

if not __name__.startswith("flashckpt."):  # a bare `import trainer` would make a second copy of every class
    raise ImportError(f"import this package as flashckpt.trainer, not as {__name__!r}")
