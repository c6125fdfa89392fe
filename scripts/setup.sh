#!/usr/bin/env bash
# Creates .venv (or reuses it) and installs hf_longctx with the extras named as arguments:  bash scripts/setup.sh demo test
# torch comes first and through the constraints file, so that no other package pulls in a build for another device.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=$(IFS=,; echo "$*")
python=${PYTHON:-python3}
"$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 12) else f"hf_longctx needs Python 3.11 or 3.12, and {sys.executable} is {v[0]}.{v[1]}: set PYTHON=/path/to/python3.11")'
[ -x .venv/bin/python ] || "$python" -m venv .venv

# An extra is installed once for each state of the requirements; a stamp file remembers it.
state=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)
stamps=(".venv/installed-$state")
for extra in "$@"; do stamps+=(".venv/installed-$state-$extra"); done
for stamp in "${stamps[@]}"; do
    if [ ! -e "$stamp" ]; then
        pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
        "${pip[@]}" --constraint scripts/constraints.txt torch
        "${pip[@]}" --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
        touch "${stamps[@]}"
        break
    fi
done
