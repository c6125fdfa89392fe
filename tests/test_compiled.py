"""Machine code kept on disk is never older than any of the files it was made from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLER = """
from hf_longctx.planner.compiled import compiled
from callee import inner


@compiled
def outer(x):
    return 10 * inner(x)


print(outer(1), sum(outer.stats.cache_hits.values()))
"""
CALLEE = """
from hf_longctx.planner.compiled import compiled


@compiled
def inner(x):
    return x + {added}
"""


@pytest.mark.processes
def test_a_function_is_compiled_anew_when_one_that_it_calls_changes(tmp_path: Path):
    """numba alone would take the old one of the caller, and print 20 again."""

    def run() -> list[str]:
        command = [sys.executable, str(tmp_path / "caller.py")]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()

    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(added=1))
    assert run() == ["20", "0"]
    assert run() == ["20", "1"], "taken from the disk"
    (tmp_path / "callee.py").write_text(CALLEE.format(added=200))
    assert run() == ["2010", "0"]
