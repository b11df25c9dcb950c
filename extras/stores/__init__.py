"""Stores beside those of `flashckpt.storage`, found by entry points: obstore for s3://, and webhdfs://.

In and out: as `flashckpt.storage`. May import: errors, storage; no torch.
"""
