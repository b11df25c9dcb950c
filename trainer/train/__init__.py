"""The training loop: steps, optimizer, learning rate, guard against anomalies, what is reported.

In: a configuration, a cut model, data. Out: a trained state, checkpoints, a trace.
May import: everything else of the trainer but demo.
"""
