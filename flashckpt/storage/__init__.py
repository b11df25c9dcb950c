"""Places where checkpoints live: one interface, one backend per kind of storage. Torch-free."""
