"""What a model says: text from a checkpoint, a folder or a job's memory, and samples during training.

In: weights, a tokenizer, a prompt. Out: text, token by token.
May import: trainer.model, trainer.hub, trainer.data, trainer.parallel.
"""
