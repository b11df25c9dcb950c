"""Commands that look closer: `inspect`, `diff`, `doctor`, `top`, `cp`. Torch-free.

In: roots, and this machine's memory of a job, as the dashboard gathers them. Out: lines for people, JSON and exit codes for
programs. `persist` asks the job's persister; `cp` and `rm` change roots by the writes that a commit and a retention make.
"""
