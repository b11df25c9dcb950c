"""Python programs with this folder on PYTHONPATH run as where the packages named by WITHOUT_PACKAGES are not installed."""

import os
import sys

for name in os.environ.get("WITHOUT_PACKAGES", "").split():
    sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec: no such module
