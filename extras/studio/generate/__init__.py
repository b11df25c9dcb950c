"""Text from a checkpoint, a folder or a running job.

In: weights, a tokenizer, a prompt. Out: text, token by token.
"""
