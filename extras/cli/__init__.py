"""The `flashckpt` command; its subcommands are entry points. Torch-free."""
