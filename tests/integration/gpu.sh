#!/usr/bin/env bash
# The path through a GPU in one command: see tests/integration/gpu/gpu.sh, which this is.
exec bash "$(dirname "$0")/gpu/gpu.sh" "$@"
