"""The hook of a scheduler: a command or webhook; OpenTelemetry. Torch-free.

In: `FLASHCKPT_HOOK`, incidents and bad nodes from dlrun, commits from the persister. Out: one JSON record for each.
In: `FLASHCKPT_OTLP_URL`, the persister's metrics. Out: the same ones as OTLP.
"""
