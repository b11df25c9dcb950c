"""`python -m flashckpt.exactness PLAN SCRIPT ARGS`: each rank of a checked script."""

from __future__ import annotations

import sys

from flashckpt.exactness.probe import main

if __name__ == "__main__":
    main(sys.argv[1:])
