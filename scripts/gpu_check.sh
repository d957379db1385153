#!/bin/sh
# Check specroll on this machine's GPU, in under six minutes: scripts/gpu_check.sh [--json FILE]; see docs/commands.md.
root=$(dirname "$0")/..
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || { echo "gpu_check: no $python: run 'make setup', or name one by PYTHON=..." >&2; exit 1; }
exec "$python" "$root/scripts/gpu_check.py" "$@"
