"""Samples that loaders prepared, kept for a restart: `Checkpointer.keep_samples`."""
