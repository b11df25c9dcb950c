"""Checkpoints of other formats: `export` and `import`. safetensors, torch.save files, folders of dcp, Megatron, DeepSpeed."""
