"""The training loop: steps, rate, guard, reports.

In: a configuration, a cut model, data. Out: a trained state, checkpoints, a trace.
"""
