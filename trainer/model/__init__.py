"""The transformer, dense or with experts.

In: a configuration. Out: modules with global names.
May import: trainer.config.
"""
