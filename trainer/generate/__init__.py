"""Text from a checkpoint, a folder or a running job.

In: weights, a tokenizer, a prompt. Out: text, token by token.
May import: trainer.model, trainer.hub, trainer.data, trainer.parallel.
"""
