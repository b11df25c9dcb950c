"""`train.float8`: linear layers in float8, by torchao."""
