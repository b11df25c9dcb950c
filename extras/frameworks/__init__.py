"""Callbacks for other training frameworks: each module imports its framework, this package imports none."""
