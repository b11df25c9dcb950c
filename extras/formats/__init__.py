"""Checkpoints of other formats: safetensors, torch.save files, folders of torch.distributed.checkpoint."""
