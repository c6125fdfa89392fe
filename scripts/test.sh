#!/usr/bin/env bash
# Sets up .venv, then checks style and types and runs all tests; arguments go to pytest:  bash scripts/test.sh -k layout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh demo test

# Pages are tested in a real browser. Without one, and without the right to install one, those tests fail and say so; the
# others run:  bash scripts/test.sh -m "not browser"
if [ -z "${HF_LONGCTX_BROWSER:-}" ] && ! command -v chromium chromium-browser google-chrome chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium || true
    fi
fi
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy
# Two processes, each with worlds of ranks of its own; the tests of a file stay together, and tests/conftest.py orders the files.
.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
