"""The hook of a scheduler: a command or webhook. Torch-free.

In: `FLASHCKPT_HOOK`, incidents and bad nodes from dlrun, commits from the persister. Out: one JSON record for each.
"""
