"""The operating system: processes, NUMA, logs.

In: pids, sizes, streams. Out: reaped processes, placed threads, lines.
No torch.
"""
