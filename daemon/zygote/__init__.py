"""The warm parent of the workers: it imports torch once, and each worker is a fork of it.

In: requests on a socket pair. Out: processes that run a script as a new interpreter would.
May import: machine, the engine's agent_folder and shm; torch, single-threaded.
"""
