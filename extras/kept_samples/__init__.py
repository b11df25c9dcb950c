"""Samples that loaders prepared outlive their process: `Checkpointer.keep_samples`."""
