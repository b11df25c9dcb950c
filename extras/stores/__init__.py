"""Stores found by entry points: s3://, webhdfs://, all others of fsspec.

In and out: as `flashckpt.storage`.
"""
