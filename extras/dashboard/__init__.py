"""`flashckpt dashboard`: one page of a running or finished job, from its root and this machine's memory. Torch-free.

It owns no truth: everything on it is read from records that other commands read too. Standard library only.
"""
