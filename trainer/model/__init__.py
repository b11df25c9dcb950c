"""The transformer, dense or with experts, and its initial weights.

In: a configuration. Out: modules with global names.
May import: trainer.model_config.
"""
