#!/usr/bin/env bash
# Sets up .venv, then checks style and types and runs all tests; arguments go to pytest:  bash scripts/test.sh -k layout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh demo test
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
