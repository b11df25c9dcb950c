"""dlrun: the agent of one node, in place of torchrun's.

In: a command line, signals, the ends of workers. Out: ranks that run, restarts, reports, an exit code.
"""
