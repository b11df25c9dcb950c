"""Names of the peers, apart from their code so that the command line starts without torch."""

NAMES = ("torch.save", "dcp.save", "dcp.async_save", "safetensors")
