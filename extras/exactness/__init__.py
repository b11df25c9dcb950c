"""`flashckpt check`: whether a script continues exactly. Its ranks load torch, the command does not.

In: a user's script. It runs three times, twice unbroken and once killed and restarted; a probe in its ranks writes down
digests of what each step began and ended with. Out: what differs, the cause before its consequences.
"""
