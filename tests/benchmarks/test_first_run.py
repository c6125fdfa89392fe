"""The benchmark of a new user's first run: it sets nothing that they would not have, and keeps what was printed."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_first_run_has_no_setting_that_a_new_user_would_not_have(monkeypatch, tmp_path):
    from benchmarks import first_run

    dropped = (
        "ONEDNN_MAX_CPU_ISA",
        "NUMBA_DISABLE_JIT",
        "ACCELERATE_USE_FSDP",
        "HF_LONGCTX_CAPACITY",
        "OMP_NUM_THREADS",
    )
    kept = ("LC_ALL", "PIP_INDEX_URL", "https_proxy", "SSL_CERT_FILE", "HF_LONGCTX_BROWSER")
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, f"of {name}")
    environment = first_run.environment(tmp_path / "home", {"ATEN_CPU_CAPABILITY": "avx2"})
    assert not environment.keys() & set(dropped)
    assert {name: environment[name] for name in kept} == {name: f"of {name}" for name in kept}
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["HOME"] == str(tmp_path / "home")
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"


def test_a_first_run_keeps_every_line_that_was_printed(monkeypatch, tmp_path):
    """With --check alone, too."""
    from benchmarks import first_run
    from benchmarks.process_tree import Measured

    assert first_run.arguments_of(["--check"]).output == ROOT / "runs" / "first_run"
    lines = ["1 of 4  environment", "a warning", ""]
    monkeypatch.setattr(first_run.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(first_run, "measure", lambda *_: Measured(0, lines, 1.0, 1.0, 2**30, {}))
    run = first_run.FirstRun(tmp_path / "clone", tmp_path / "lines")
    run.run("quickstart/first run", ["bash"], {})
    assert (tmp_path / "lines" / "quickstart, first run.txt").read_text() == "1 of 4  environment\na warning\n\n"
    assert run.warnings == ["quickstart/first run: a warning"]
