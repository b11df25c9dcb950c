"""Stores found by entry points: s3:// by s3fs or obstore, webhdfs://, all others of fsspec.

In and out: as `flashckpt.storage`.
"""
