"""The path through a GPU: tests and numbers, in one command for a machine that has one (`gpu.sh`)."""
