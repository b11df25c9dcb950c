"""The warm parent of the workers: imports once, forks.

In: requests on a socket pair. Out: processes that run a script as a new interpreter would.
May import: machine, the engine's agent_folder and shm; torch, single-threaded.
"""
