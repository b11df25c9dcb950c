"""The memory tier of one job on one node.

In: a job id and sizes. Out: slots to write into, pins to read from, records of the job.
No torch.
"""
