"""The memory tier of one job on one node: its directory, segments, leases, control page and watermark. Torch-free."""
