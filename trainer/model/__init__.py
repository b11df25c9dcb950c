"""The transformer: layers, first weights, FLOPs.

In: a configuration. Out: modules with global names.
May import: trainer.config; `flops` and `recompute` are pure and torch-free.
"""
