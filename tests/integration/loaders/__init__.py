"""Loaders of other libraries under ExactLoader: which continue exactly after kills, with other workers, on other ranks."""
