"""`make demo`: a run that is killed twice, compared with one that is not, and the page that shows it.

In: a folder. Out: traces, a picture, a verdict.
May import: everything of the trainer.
"""
