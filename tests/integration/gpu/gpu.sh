#!/usr/bin/env bash
# The path through a GPU in one command, at most 9 minutes: tests, then numbers; one table, one JSON in $OUT/gpu.json.
#
#   tests/integration/gpu.sh [--device cuda|cpu] [--minutes 9] [--parts NAME,NAME] [--list]
#
# Needs Python 3.10 or newer with torch, and .gpu-wheels (make gpu-wheels) for what else is missing there; no network, no
# installation. PYTHON: another interpreter. OUT: another folder than out/gpu. Ends with 0: all was run and passed, 1: a part failed,
# 2: no GPU, 3: the time was over before all was run, 4: it could not begin (an argument, Python, torch, wheels, a folder).
set -euo pipefail
{ # read whole before it runs: the file may change meanwhile
case "${1:-}" in -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3}
out=${OUT:-out/gpu}
fail() { echo "gpu: $1" >&2; exit 4; }
command -v "$python" >/dev/null || fail "$python not found: set PYTHON to Python 3.10 or newer with torch"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or newer is needed, found $("$python" -V 2>&1): set PYTHON"
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
  fail "$python has no torch: set PYTHON to one that has it (torch is the machine's own and not among the wheels)"
{ mkdir -p "$out" && test -w "$out"; } 2>/dev/null || fail "$out cannot be written: set OUT to a folder that can"
test -w /dev/shm || fail "/dev/shm cannot be written: snapshots lie there"
work=$(mktemp -d "${TMPDIR:-/tmp}/flashckpt-gpu.XXXXXX")
mounted= placed=
cleanup() {
  if [ -n "$placed" ]; then rm -f "$placed"; fi
  if [ -n "$mounted" ]; then umount -l "$mounted" || true; fi
  rm -rf "$work" "${FLASHCKPT_SHM_DIR:?}"
}
export FLASHCKPT_SHM_DIR=/dev/shm/flashckpt-gpu.$$
trap cleanup EXIT
"$python" tests/integration/gpu/wheels.py unpack .gpu-wheels "$work/site" || exit 4
# The C part as it was built where the wheels were fetched; where it does not load, copies are made in Python, and the table says so.
native=flashckpt/native/_copy.abi3.so
if [ ! -e "$native" ] && [ -e .gpu-wheels/_copy.abi3.so ]; then cp .gpu-wheels/_copy.abi3.so "$native" && placed=$native; fi
export PYTHONPATH="$PWD:$PWD/tests:$PWD/benchmarks:$work/site" PYTHONUNBUFFERED=1 TMPDIR="$work"
# Snapshots of 32 GB of state need 64 GB: where /dev/shm is smaller, root takes a tmpfs of its own. It is filled only as far as is used.
if [ "$(df -k --output=size /dev/shm | tail -1)" -lt 100000000 ] && [ "$(id -u)" = 0 ] && [[ " $* " != *" --device cpu "* && " $* " != *" --device=cpu "* ]]; then
  mkdir -p "$work/shm"
  if mount -t tmpfs -o size=100g flashckpt-gpu "$work/shm" 2>/dev/null; then
    mounted=$work/shm
    export FLASHCKPT_SHM_DIR=$work/shm/segments
  fi
fi
mkdir -p "$FLASHCKPT_SHM_DIR"
export GPU_TEST_SHM=$FLASHCKPT_SHM_DIR
status=0
"$python" -m integration.gpu.run --out "$out" --work "$work/parts" "$@" || status=$?
exit "$status"
}
