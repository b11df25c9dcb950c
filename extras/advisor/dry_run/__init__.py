"""What a run would hold, on ranks that do not exist: `--dry-run --world N`.

In: a configuration and a number of ranks. Out: bytes per rank, as a table or JSON; nothing gets memory.
May import: everything else of the trainer except demo.
"""
