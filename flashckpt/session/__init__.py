"""The public class `Checkpointer`, and what its steps do.

In: settings, tracked objects, steps. Out: restored state, snapshots, waits for their persist.
"""
