#!/bin/sh
# Gather wheels for a Linux x86-64 machine without internet: all that the library and its tests need beside torch and
# NumPy, which that machine has.
#
#     scripts/gpu/bundle.sh FOLDER [core] [tests] [peers | an extra | a package ...]     # default: core tests
#
# Run it where there is a package index, then copy the folder and this repository to the machine: install.sh there.
# PYTHON: the interpreter (3.11 is best: environment markers are evaluated for it). PYTHONS: versions of the wheels.
# LIMIT_MB: fails when the folder is larger.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
limit=${LIMIT_MB:-50}
[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$1
shift
[ $# -gt 0 ] || set -- core tests

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
"$python" "$root/scripts/gpu/requirements.py" --stand-ins "$work/stand-ins"
"$python" "$root/scripts/gpu/requirements.py" --pins > "$work/pins.txt"
printf 'torch==%s\nnumpy==%s\n' \
  "$(ls "$work/stand-ins" | sed -n 's/^torch-\(.*\)-py3.*/\1/p')" \
  "$(ls "$work/stand-ins" | sed -n 's/^numpy-\(.*\)-py3.*/\1/p')" >> "$work/pins.txt"
"$python" "$root/scripts/gpu/requirements.py" "$@" > "$work/wanted.txt"
platforms=
for tag in manylinux_2_34 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 \
  manylinux2010 manylinux_2_5 manylinux1; do
  platforms="$platforms --platform ${tag}_x86_64"
done
for version in ${PYTHONS:-3.11 3.12 3.13}; do
  echo "Python $version"
  # shellcheck disable=SC2086
  "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: $platforms \
    --python-version "$version" --implementation cp --abi "cp${version%.*}${version#*.}" --abi abi3 --abi none \
    --find-links "$work/stand-ins" --constraint "$work/pins.txt" --requirement "$work/wanted.txt" --dest "$folder"
  rm -f "$folder"/*+stand.in-*
done
size=$(du -sm "$folder" | cut -f1)
echo "$(ls "$folder" | wc -l) wheels, $size MB, in $folder"
[ "$size" -le "$limit" ] || { echo "error: more than $limit MB. fix: name fewer parts, or set LIMIT_MB"; exit 1; }
