"""`flashckpt bench`: measure shared memory and storage the way flashckpt uses them.

Torch-free, except for the peers (`flashckpt.bench.peers`), which are other people's libraries
measured at the same layout in the same run.
"""

PEERS = ("torch.save", "dcp.save", "dcp.async_save", "safetensors")
