"""`flashckpt plan`: intervals, and what failures will cost. Torch-free."""
