"""Other Python programs of this repository that a part runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(*arguments: str, seconds: float, **environment: str) -> tuple[int, str]:
    """Run `python ARGUMENTS` from the repository's root.

    Returns:
        Its exit status and all that it printed.

    Raises:
        TimeoutError: it took longer than `seconds`; it was ended.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"python {' '.join(arguments)} was not done after {seconds:.0f} s") from error
    return done.returncode, done.stdout
