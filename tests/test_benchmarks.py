"""What benchmarks are concluded with: targets, tables, the byte counter, and the stand-in for flash-attn."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts: their folder is on the path while they run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "stand_ins"))


def test_every_target_is_of_a_benchmark_that_exists():
    from report import load_targets

    targets, reached = load_targets()
    assert {target.issue for target in targets} >= reached
    for target in targets:
        assert (BENCHMARKS / f"{target.benchmark}.py").is_file(), target


@pytest.mark.parametrize("benchmark", ["attention", "training"])
def test_the_committed_results_meet_the_targets_reached(benchmark: str):
    """A target whose pattern matches no figure would count as missed, so this checks the patterns too."""
    from report import missed

    results = json.loads((BENCHMARKS / "results" / f"{benchmark}.json").read_text())
    assert results["command"].startswith(f"python benchmarks/{benchmark}.py")
    assert missed(benchmark, results["figures"]) == []


def test_a_missed_target_is_named_with_its_value_and_bound():
    from report import Target

    target = Target(issue=2, benchmark="attention", figure="*/ours/error", at_most=1e-5)
    figures = {"a/ours/error": 1e-6, "b/ours/error": 2e-5, "b/peer/error": 1.0, "c/ours/error": float("nan")}
    assert target.missed(figures) == [
        "b/ours/error is 2e-05, target: at most 1e-05 (issue 2)",
        "c/ours/error is nan, target: at most 1e-05 (issue 2)",
    ]


def test_a_target_that_nothing_measured_is_missed():
    from report import Target

    (line,) = Target(issue=2, benchmark="attention", figure="4 ranks/*", at_most=1).missed({"2 ranks/ours": 0.5})
    assert "not measured" in line
    assert "4 ranks/*" in line


@pytest.mark.parametrize(("error", "status"), [(1e-6, 0), (1e-3, 1)])
def test_check_decides_the_exit_status(error, status, tmp_path, monkeypatch, capsys):
    import report

    (tmp_path / "targets.toml").write_text(
        'reached = [2]\n[[target]]\nissue = 2\nbenchmark = "attention"\nfigure = "*/error"\nat_most = 1e-5\n'
        '[[target]]\nissue = 3\nbenchmark = "attention"\nfigure = "later"\nat_most = 0\n'
    )
    monkeypatch.setattr(report.load_targets, "__defaults__", (tmp_path / "targets.toml",))
    monkeypatch.setattr(sys, "argv", ["attention.py", "--check", "--json", str(tmp_path / "out.json")])
    arguments = report.parser("").parse_args()
    figures = {"ours/error": error}
    assert report.conclude(arguments, [{"who": "ours", "error": f"{error:.0e}"}], figures, 0.0) == status
    printed = capsys.readouterr()
    assert ("ours/error is 0.001" in printed.err) == bool(status)
    assert json.loads((tmp_path / "out.json").read_text())["figures"] == figures
    arguments.check = [3]
    assert report.conclude(arguments, [{"who": "ours", "error": "0"}], figures, 0.0) == 1
    assert "later: not measured" in capsys.readouterr().err


def test_a_table_aligns_numbers_to_the_right():
    from report import table

    assert table([{"who": "ours", "ratio": "1.00"}, {"who": "a peer", "ratio": "-"}]).splitlines() == [
        "| who    | ratio |",
        "| ------ | ----: |",
        "| ours   |  1.00 |",
        "| a peer |     - |",
    ]


def test_cases_hold_the_tokens_asked_for():
    from attention_cases import cases

    for case in cases(1920):
        assert case.tokens == sum(case.lengths)
        assert 1919 <= case.tokens <= 1920
        assert min(case.lengths) > 0
    with pytest.raises(ValueError, match="--tokens 100 must be a multiple of 32 and at least"):
        cases(100)


def test_the_padding_share_counts_what_is_filled_up():
    from training import padding_share

    lengths = np.array([4, 1, 2, 2])
    assert padding_share("padded", lengths, 2) == pytest.approx(3 / 12)
    assert padding_share("single", lengths, 2) == 0


def _count_traffic() -> list[int]:
    """Bytes counted for one operation of each kind, of 40 float32 values on every rank."""
    import torch.distributed as dist

    sys.path.insert(0, str(BENCHMARKS))
    from traffic import Traffic

    sys.path.remove(str(BENCHMARKS))
    x, n, group = torch.ones(40), dist.get_world_size(), dist.group.WORLD
    right, left = (dist.get_rank() + 1) % n, (dist.get_rank() - 1) % n

    def point_to_point() -> None:
        send, receive = dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, torch.empty(40), left)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    counts = []
    with Traffic() as traffic:
        for operation in (
            point_to_point,
            lambda: dist.all_to_all_single(torch.empty(40), x),
            lambda: dist.all_gather_into_tensor(torch.empty(40 * n), x, group),
            lambda: dist.reduce_scatter_tensor(torch.empty(40 // n), x, group=group),
        ):
            before = traffic.sent
            operation()
            counts.append(traffic.sent - before)
    point_to_point()
    return [*counts, traffic.sent - sum(counts)]


def test_traffic_counts_what_leaves_a_rank_while_it_is_open(ranks4):
    assert ranks4.run(_count_traffic) == [[160, 120, 480, 120, 0]] * 4


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_stand_in_for_flash_attn_is_attention_aligned_to_the_bottom_right(kv_heads: int):
    """Three queries over the last three of seven keys' rows, against a mask; two documents of a varlen call."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(5, 4, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(9, kv_heads, 8, generator=generator) for _ in range(2))
    bounds = torch.tensor([0, 3, 5]), torch.tensor([0, 7, 9])
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *bounds, 3, 7, 0.0, 0.3, True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _flash_attn_varlen_backward(grad, q, k, v, out, lse, *grads, *bounds, 3, 7, 0.0, 0.3, True)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    mask = torch.full((5, 9), float("-inf"), dtype=torch.float64)
    for rows, keys in ((range(3), range(7)), (range(3, 5), range(7, 9))):
        for i, row in enumerate(rows):
            mask[row, keys[0] : keys[-1] + 1 - (len(rows) - 1 - i)] = 0
    keys, values = (x.repeat_interleave(4 // kv_heads, 1) for x in exact[1:])
    scores = torch.einsum("qhd,khd->hqk", exact[0], keys) * 0.3 + mask
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).detach(), rtol=0, atol=1e-6)
    for got, x in zip(grads, exact):
        torch.testing.assert_close(got.double(), x.grad, rtol=0, atol=1e-5)
