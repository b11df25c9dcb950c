"""Stores found by entry points: obstore for s3://, webhdfs://.

In and out: as `flashckpt.storage`.
"""
