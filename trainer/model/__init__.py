"""The transformer: layers, first weights.

In: a configuration. Out: modules with global names.
`recompute` is pure and without torch.
"""
