"""`flashckpt plan`: how often to snapshot and to persist, and what failures will cost. Torch-free."""
