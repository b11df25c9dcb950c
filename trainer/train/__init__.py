"""The training loop: steps, optimizer, learning rate, guard against anomalies, reports.

In: a configuration, a cut model, data. Out: a trained state, checkpoints, a trace.
May import: everything else of the trainer. What of extras/ it uses, it finds by `flashckpt.plugin`.
"""
