"""How long tests wait before they give up. No test says how quick something is: benchmarks/targets.toml does.

A test that hangs ends after PATIENCE and shows the stacks of its processes; a machine that is ten times slower, or busy with
other programs, ends no test that would have passed.
"""

import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("LONGCTX_TEST_PATIENCE", "900"))
"""Seconds that anything may take which a test waits for. The slowest takes 80 on two idle cores."""


def wait_until(condition: Callable[[], bool]) -> bool:
    """Waits for a condition; whether it has come true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
