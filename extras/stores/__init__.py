"""Stores found by entry points: obstore for s3://, and webhdfs://.

In and out: as `flashckpt.storage`. """
