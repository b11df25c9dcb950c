"""`make demo`: a run killed twice, beside one that is not.

In: a folder. Out: traces, a picture, a verdict.
"""
