"""The objects a user names, as tensors with names and boxes."""
