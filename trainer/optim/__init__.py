"""The optimizers of a run; averages of the weights.

In: parallel parts of a model. Out: torch optimizers whose state is named, sharded and restored like any other.
"""
