"""Samples that loaders prepared, kept for a restart: `ckpt.keep_samples`."""
