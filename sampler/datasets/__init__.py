"""Readers of training data: tokens, lines, rows and packed documents, local or on object storage.

In: files or URLs, an index. Out: the sample of that index, the same in every process.
May import: sampler.errors, sampler.order.
"""
