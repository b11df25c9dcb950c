"""Text to tokens before a run: corpora, vocabularies, duplicates.

In: `[data]` of a configuration. Out: folders that `flashckpt.trainer.data` reads. Torch-free.
"""
