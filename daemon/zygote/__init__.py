"""The warm parent of the workers: imports once, forks.

In: requests on a socket pair. Out: processes that run a script as a new interpreter would.
Imports torch, and stays single-threaded.
"""
