#!/bin/sh
# Install Lockstep on a machine without internet, beside the torch that it has, from the folder of bundle.sh.
#
#     scripts/gpu/install.sh FOLDER [core] [tests] [peers | an extra | a package ...]    # default: core tests
#
# It makes .venv in this repository, which sees all packages of the machine's Python, and installs into it what is
# missing there. The machine's own packages stay as they are. PYTHON: the interpreter that has torch.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
[ -d "$1" ] || { echo "error: there is no folder $1. fix: make it with scripts/gpu/bundle.sh, and copy it here"; exit 2; }
folder=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- core tests
venv=${VENV:-$root/.venv}

"$python" -c 'import torch' 2>/dev/null || {
  echo "error: $python has no torch. fix: PYTHON=/path/to/the/python/that/has/it $0 ..."; exit 1; }
before=$("$python" -c 'import torch; print(torch.__version__, torch.__file__)')
[ -x "$venv/bin/python" ] || "$python" -m venv --without-pip "$venv"
# A .pth, not --system-site-packages: where $python is itself a virtual environment, that would show its base's packages.
"$python" - "$venv" <<'END'
import pathlib, site, sys, sysconfig
folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
folders |= {site.getusersitepackages()} if site.ENABLE_USER_SITE else set()
target = pathlib.Path(sys.argv[1], "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
there = [folder for folder in sorted(folders) if pathlib.Path(folder).is_dir()]
(target / "machine.pth").write_text("\n".join(there) + "\n")
END
pip="-m pip --disable-pip-version-check"
# In the environment, which has no pip, by the pip of the machine.
PYTHONPATH=$("$python" -c 'import pathlib, pip; print(pathlib.Path(pip.__file__).parents[1])') \
  "$venv/bin/python" "$root/scripts/gpu/requirements.py" --missing "$folder" "$@" > "$venv/missing.txt"
# Without dependencies, which are all in the list: pip would also look for what the machine's torch asks for.
if [ -s "$venv/missing.txt" ]; then
  # shellcheck disable=SC2046,SC2086
  "$python" $pip --python "$venv/bin/python" install --quiet --no-index --no-deps $(cat "$venv/missing.txt")
fi
# shellcheck disable=SC2086
"$python" $pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-build-isolation --editable "$root"
after=$("$venv/bin/python" -c 'import torch; print(torch.__version__, torch.__file__)')
[ "$before" = "$after" ] || { echo "error: torch was $before and is $after now"; exit 1; }
touch "$venv/.installed" # for the Makefile: make train and make test use it as it is
"$venv/bin/python" -m lockstep --version
echo "torch $after is unchanged. Next: scripts/gpu/check.sh"
