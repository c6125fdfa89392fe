"""The tests of this repository that use a GPU where there is one."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from acceptance import programs
from acceptance.record import Bench

FILES = (
    "tests/attention/kernels/test_kernels.py",
    "tests/attention/kernels/test_varlen_kernels.py",
    "tests/attention/kernels/test_kernel_report.py",
)
ON_A_GPU = "cuda"
"""Part of the names of the tests that need one."""
MOST_NAMED = 20


def measure(bench: Bench) -> None:
    """Run them and count; what fails is named.

    Raises:
        RuntimeError: a test failed, or none was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        _, output = programs.run_program(
            *("-m", "pytest", *FILES, "-k", ON_A_GPU, "-p", "no:cacheprovider", f"--junitxml={report}"),
            seconds=bench.left(),
            HF_LONGCTX_TEST_CUDA="1",
        )
        print(output)
        if not report.exists():
            raise RuntimeError("pytest wrote no report: is the package installed with its tests, hf_longctx[test]?")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = {"failed": ("failure", "error"), "skipped": ("skipped",)}
    of_kind = {kind: [c for c in cases if any(c.find(tag) is not None for tag in tags)] for kind, tags in kinds.items()}
    passed = len(cases) - sum(map(len, of_kind.values()))
    counts = {"passed": passed} | {kind: len(tests) for kind, tests in of_kind.items()}
    bench.table(
        "Tests", [{name: str(count) for name, count in counts.items()}], {f"tests/{n}": c for n, c in counts.items()}
    )
    failed = [f"{test.get('classname')}::{test.get('name')}" for test in of_kind["failed"]]
    if failed:
        bench.table("Failed", [{"test": name} for name in failed[:MOST_NAMED]])
        raise RuntimeError(f"{len(failed)} of {len(cases)} tests failed: {failed[0]}")
    if not cases:
        raise RuntimeError(f"no test of {', '.join(FILES)} has {ON_A_GPU} in its name")
