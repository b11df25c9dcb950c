"""What a run would hold, on ranks that do not exist.

In: a configuration and a number of ranks. Out: bytes per rank, as a table or JSON; nothing gets memory.
"""
