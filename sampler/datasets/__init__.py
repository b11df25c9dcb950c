"""Training data read: tokens, lines, rows, packed documents.

In: files or URLs, an index. Out: the sample of that index, the same in every process.
"""
