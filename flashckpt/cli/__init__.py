"""The `flashckpt` command, one module per subcommand. Torch-free."""
