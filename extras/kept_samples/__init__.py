"""Samples that loaders prepared, kept for a restart: `keep_samples`."""
