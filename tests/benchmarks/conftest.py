"""Scripts of benchmarks/ on the path."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts: their folder is on the path while they run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "stand_ins"))
