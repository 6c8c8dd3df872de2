#!/bin/sh
# What works on this machine's GPU, and how fast: see check.py.
#
#     scripts/gpu/check.sh [MINUTES] [--device ...] [--quick] [--out FOLDER] [--only NAME,...] [--resume] [--list]
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
exec "$python" "$root/scripts/gpu/check.py" "$@"
