"""`flashckpt bench`: shared memory and storage, measured.

Torch-free, except for the peers (`flashckpt.bench.rank`), which are other people's libraries
measured at the same layout in the same run.
"""

PEERS = ("torch.save", "dcp.save", "dcp.async_save", "safetensors")
