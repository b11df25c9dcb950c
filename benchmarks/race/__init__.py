"""The race: one training program, the same failures, several ways to survive them. `make race`."""
