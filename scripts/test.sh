#!/usr/bin/env bash
# Sets up .venv, then checks style and types and runs all tests; arguments go to pytest:  bash scripts/test.sh -k layout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v git >/dev/null || { echo "test: git is needed (tests/repository/test_packaging.py asks it which files there are): install it" >&2; exit 1; }
bash scripts/setup.sh demo test

# Pages are tested in a real browser. Without one, and without the right to install one, those tests fail and say so; the
# others run:  bash scripts/test.sh -m "not browser"
if [ -z "${HF_LONGCTX_BROWSER:-}" ] && ! command -v chromium chromium-browser google-chrome chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Chromium, which pages are tested in, once: about a minute"
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
            || echo "Chromium could not be installed: tests of pages will fail; without them: bash scripts/test.sh -m 'not browser'"
    else
        echo "There is no browser, and installing Chromium needs root: tests of pages will fail; without them: bash scripts/test.sh -m 'not browser'"
    fi
fi
.venv/bin/ruff check
.venv/bin/ruff format --check
# Without files of byte code every process would compile the package and the tests once more.
unset PYTHONDONTWRITEBYTECODE
# mypy takes what tests leave where they wait.
nice .venv/bin/mypy >.venv/mypy.log 2>&1 & types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
# Processes, each with worlds of ranks of its own: one more than cores, since some tests wait, at most six, and each may take
# 4 GiB. The tests of a file stay together, and tests/conftest.py orders the files.
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
processes=$((cores < 5 ? cores + 1 : 6))
room=$(awk '/MemAvailable/ { print int($2 / 4194304) }' /proc/meminfo 2>/dev/null || echo 6)
if [ "$processes" -gt "$room" ]; then processes=$((room > 1 ? room : 1)); fi
tests=0
# Only tests of CUDA kernels see a GPU.
if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    HF_LONGCTX_TEST_CUDA=1 .venv/bin/python -m pytest tests/attention/kernels -k cuda || tests=$?
fi
.venv/bin/python -m pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder "$@" || tests=$?
wait "$types" || { cat .venv/mypy.log; exit 1; }
tail -n 1 .venv/mypy.log
exit "$tests"
