"""Scores of a trained state, and the check of a layout against one process.

In: a configuration, a model. Out: losses.
May import: trainer.model, trainer.parallel, trainer.data, trainer.train.
"""
