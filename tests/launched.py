"""Programs of two gloo ranks started as users start them, in processes of their own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]


@dataclass
class Ended:
    """How a launch ended."""

    code: int
    output: str
    """of all ranks, stdout and stderr together"""


def torchrun(*program: Any, ranks: int = 2, timeout: float = 0.0, **environment: str) -> Ended:
    """Runs `program` through torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return run(*launcher, *program, timeout=timeout, **environment)


def accelerate_launch(*program: Any, ranks: int = 2, timeout: float = 0.0, **environment: str) -> Ended:
    """Runs `program` through accelerate, on CPU processes."""
    launcher = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        str(ranks),
        "--main_process_port",
        "0",
    ]
    return run(*launcher, *program, timeout=timeout, **environment)


def run(*arguments: Any, timeout: float = 0.0, **environment: str) -> Ended:
    """Runs this Python with these arguments from the repository's root; kills it after PATIENCE, or `timeout` seconds if
    that is longer."""
    quiet = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | quiet | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(timeout, PATIENCE),
    )
    return Ended(done.returncode, done.stdout)
