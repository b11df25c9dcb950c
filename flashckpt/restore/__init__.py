"""From byte ranges back to live state, all ranks together.

In: inventories of memory, a root, live objects. Out: filled live state, a report, the new generation.
"""
