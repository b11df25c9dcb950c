"""Checkpoints on storage: packs, indexes, MANIFEST, intents, generations and retention. Torch-free."""
