"""Callbacks for other training frameworks. Each module imports its framework, this package imports none."""
