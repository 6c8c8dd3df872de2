#!/bin/sh
# What needs several GPUs: NCCL between them, peer access, every strategy: see check.py.
#
#     scripts/gpu/check_many.sh [MINUTES] [--device ...] [--quick] [--out FOLDER] [--only NAME,...] [--resume] [--list]
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
exec "$python" "$root/scripts/gpu/check.py" --many "$@"
