"""What launcher, zygote and persister need of the operating system: processes, NUMA, logs.

In: pids, sizes, streams. Out: reaped processes, placed threads, lines.
May import: errors; no torch.
"""
