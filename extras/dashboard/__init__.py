"""`flashckpt dashboard`: one page of a job. Torch-free.

In: the root, and this machine's memory of the job. Out: a page, live over HTTP or as one file. It owns no truth: everything
on it is read from records that other commands read too. Standard library only.
"""
