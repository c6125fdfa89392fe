"""Targets of benchmarks: each is of a benchmark that exists, the committed results meet them, and a missed one is named."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_target_is_of_a_benchmark_that_exists():
    from report import load_targets

    targets, reached = load_targets()
    assert {target.topic for target in targets} >= reached
    for target in targets:
        assert (BENCHMARKS / f"{target.benchmark}.py").is_file(), target


@pytest.mark.parametrize(
    "benchmark",
    [
        *("attention", "training", "planner", "simulator", "prediction"),
        *("model_coverage", "memory_settings", "most_used", "general_llama"),
    ],
)
def test_the_committed_results_meet_the_targets_reached(benchmark: str):
    """A target whose pattern matches no figure would count as missed, so this checks the patterns too."""
    from report import missed

    results = json.loads((BENCHMARKS / "results" / f"{benchmark}.json").read_text())
    assert results["command"].startswith(f"python benchmarks/{benchmark}.py")
    assert missed(benchmark, results["figures"]) == []


def test_a_missed_target_is_named_with_its_value_and_bound():
    from report import Target

    target = Target(topic="exactness", benchmark="attention", figure="*/ours/error", at_most=1e-5)
    figures = {"a/ours/error": 1e-6, "b/ours/error": 2e-5, "b/peer/error": 1.0, "c/ours/error": float("nan")}
    assert target.missed(figures) == [
        "b/ours/error is 2e-05, target: at most 1e-05 (exactness)",
        "c/ours/error is nan, target: at most 1e-05 (exactness)",
    ]
    target = Target(topic="training-steps", benchmark="training", figure="speed over *", at_least=2)
    assert target.missed({"speed over a": 2.0, "speed over b": 1.5}) == [
        "speed over b is 1.5, target: at least 2 (training-steps)"
    ]


def test_a_target_that_nothing_measured_is_missed():
    from report import Target

    (line,) = Target(topic="exactness", benchmark="attention", figure="4 ranks/*", at_most=1).missed(
        {"2 ranks/ours": 0.5}
    )
    assert "not measured" in line
    assert "4 ranks/*" in line


@pytest.mark.parametrize(("error", "status"), [(1e-6, 0), (1e-3, 1)])
def test_check_decides_the_exit_status(error, status, tmp_path, monkeypatch, capsys):
    import report

    (tmp_path / "targets.toml").write_text(
        'reached = ["exactness"]\n[[target]]\ntopic = "exactness"\nbenchmark = "attention"\nfigure = "*/error"\nat_most = 1e-5\n'
        '[[target]]\ntopic = "peers"\nbenchmark = "attention"\nfigure = "later"\nat_most = 0\n'
    )
    monkeypatch.setattr(report.load_targets, "__defaults__", (tmp_path / "targets.toml",))
    monkeypatch.setattr(sys, "argv", ["attention.py", "--check", "--json", str(tmp_path / "out.json")])
    arguments = report.parser("").parse_args()
    figures = {"ours/error": error}
    assert report.conclude(arguments, [{"who": "ours", "error": f"{error:.0e}"}], figures, 0.0) == status
    printed = capsys.readouterr()
    assert ("ours/error is 0.001" in printed.err) == bool(status)
    assert json.loads((tmp_path / "out.json").read_text())["figures"] == figures
    arguments.check = ["peers"]
    assert report.conclude(arguments, [{"who": "ours", "error": "0"}], figures, 0.0) == 1
    assert "later: not measured" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        report.parser("").parse_args(["--check", "later"])
    assert "choose from" in capsys.readouterr().err


def test_a_table_aligns_numbers_to_the_right():
    from report import table

    assert table([{"who": "ours", "ratio": "1.00"}, {"who": "a peer", "ratio": "-"}]).splitlines() == [
        "| who    | ratio |",
        "| ------ | ----: |",
        "| ours   |  1.00 |",
        "| a peer |     - |",
    ]
