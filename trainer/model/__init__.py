"""The transformer: layers, first weights, FLOPs.

In: a configuration. Out: modules with global names.
`flops` and `recompute` are pure and without torch.
"""
