"""What benchmarks are concluded with: targets, tables, the byte counter, and the stand-in for flash-attn."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts: their folder is on the path while they run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "stand_ins"))


def test_every_target_is_of_a_benchmark_that_exists():
    from report import load_targets

    targets, reached = load_targets()
    assert {target.topic for target in targets} >= reached
    for target in targets:
        assert (BENCHMARKS / f"{target.benchmark}.py").is_file(), target


@pytest.mark.parametrize(
    "benchmark",
    ["attention", "training", "planner", "simulator", "prediction", "model_coverage", "most_used", "general_llama"],
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


def test_cases_hold_the_tokens_asked_for():
    from attention_cases import cases

    for case in cases(1920):
        assert case.tokens == sum(case.lengths)
        assert case.tokens in (1919, 1920, 7680)
        assert min(case.lengths) > 0
    with pytest.raises(ValueError, match="--tokens 100 must be a multiple of 32 and at least"):
        cases(100)


def test_a_github_like_pack_is_half_one_document_and_many_short_ones():
    from attention_cases import github_like_lengths

    lengths = github_like_lengths(8192)
    assert sum(lengths) == 8192
    assert lengths[0] == 4096
    assert all(length % 8 == 0 for length in lengths)  # the peer that packs wants multiples of 2 * ranks
    assert np.median(lengths) <= 16  # 2K tokens, scaled by 128
    assert 64 < max(lengths[1:]) < 4096
    assert github_like_lengths(8192) == lengths


def test_the_reference_for_alibi_has_the_bias_by_its_definition():
    """Against one call with a bias per key: equal, because a constant added to a row changes no softmax."""
    from attention_cases import Case

    case = Case("two documents", (700, 90), heads=2, kv_heads=2, head_dim=8, alibi=True)
    out, *grads = case.reference()
    *leaves, grad_out = (x.double() for x in case.inputs())
    for x in leaves:
        x.requires_grad_()
    expected = case.attend(*leaves)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-10)
    for got, gradient in zip(grads, torch.autograd.grad(expected, leaves, grad_out)):
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-10)


def _measured(seconds: float, sent: int, peak: int):
    from attention_runs import Measured

    return Measured(sent // 2, sent, peak, [1e-7, 1e-6, 2e-6, 3e-6], [seconds] * 3, [2 * seconds] * 3)


def test_figures_compare_with_one_process_a_ring_and_the_best_peer():
    from attention_cases import Case
    from attention_figures import rows, summarise
    from attention_runs import ONE_PROCESS

    case = Case("one", (64,), head_dim=16)
    ring = 4 * case.kv_bytes // 2  # 3 * 2 - 2 times all keys and values, over 2 ranks
    ranks = [
        {"ours": _measured(1.0, ring // 2, 80), "yunchang ring": _measured(1.5, ring, 50), "DeepSpeed": "why not"},
        {"ours": _measured(1.2, ring // 4, 60), "yunchang ring": _measured(1.4, ring, 40), "DeepSpeed": "why not"},
    ]
    ranks[0][ONE_PROCESS] = _measured(2.0, 0, 100)
    summaries = summarise(case, 2, ranks)
    ours = summaries["ours"]
    assert ours["slowest rank over the limit"] == pytest.approx(1.2)
    assert ours["CPU of all ranks over one process"] == pytest.approx(2 * (1.0 + 1.2) / 2.0)
    assert ours["bytes over a zigzag ring's"] == pytest.approx(3 / 8)
    assert ours["bytes over the best peer's"] == ours["bytes over the best ring's"] == pytest.approx(3 / 8)
    assert ours["peak memory over the limit"] == pytest.approx(80 * 2 / 100)
    assert ours["peak memory over the best peer's"] == pytest.approx(80 / 50)
    assert ours["error of gradients"] == 3e-6
    assert summaries["yunchang ring"]["bytes over a zigzag ring's"] == pytest.approx(1)

    table = rows({("one", ranks, name): summary for ranks in (2, 4) for name, summary in summaries.items()})
    assert [(row["implementation"], row["ranks"]) for row in table] == [
        ("ours", "2"),
        ("yunchang ring", "2"),
        ("DeepSpeed", "2, 4"),
        ("ours", "4"),
        ("yunchang ring", "4"),
    ]
    assert table[2]["remark"] == "cannot: why not"


def test_the_picture_has_a_mark_for_each_result():
    from attention_plot import PANELS, picture

    figures = dict.fromkeys(PANELS, 1.1)
    results = {
        ("one document", 2, "ours"): figures,
        ("one document", 2, "yunchang Ulysses 2 x ring"): "more ranks",
        ("one document", 4, "ours"): figures | {"slowest rank over the limit": 9.0},
        ("one document", 4, "yunchang Ulysses 2 x ring"): figures,
        ("ALiBi", 4, "ours Ulysses"): figures,
    }
    axes = picture(results).axes
    assert len(axes) == 2 * len(PANELS)
    assert [len(ax.collections) for ax in axes] == [1] * 3 + [3] * 3
    assert "9.0" in [text.get_text() for text in axes[3].texts]  # beyond the edge: written out
    assert "no peer can" in [text.get_text() for text in axes[4].texts]


@pytest.mark.parametrize("gaps", [(), (6, 1, 1)])
def test_peak_memory_is_what_a_call_holds_at_once(gaps: tuple[int, ...]):
    """Also where the heap has gaps, of so many times 20 MiB: what is freed there would be kept."""
    from peak_memory import peak_bytes_of

    peak_bytes_of(int)  # from now on glibc takes so much from its heap
    left_over = [[torch.ones(5 * 2**20) for _ in range(gap)] + [torch.ones(2**18)] for gap in gaps]
    between = [tensors.pop() for tensors in left_over]
    del left_over
    before = torch.ones(2**23)  # 32 MiB that are there already

    def call() -> int:
        torch.ones(2**24).add_(1)  # 64 MiB, and given back
        kept = torch.ones(2**22)  # 16 MiB
        return (kept + 1 + before[: 2**22]).numel()  # and two results of 16 MiB

    peak, returned = peak_bytes_of(call)
    assert returned == 2**22
    assert 63 * 2**20 <= peak <= 66 * 2**20
    assert len(between) == len(gaps)


def test_memory_of_one_process_holds_little_beyond_inputs_and_gradients():
    from memory import HEAD_DIM, HEADS, memory_of, variants

    for options in variants(4096).values():
        measured = memory_of(4096, options)
        assert measured.tensor_bytes == 8 * 4096 * HEADS * HEAD_DIM * 4
        assert measured.tensor_bytes <= measured.peak_bytes <= 3 * measured.tensor_bytes


def test_a_mixture_has_steps_of_full_packs():
    """So that packing loses nothing: every way of training takes these steps."""
    from training_cases import PACKS, best_fit_decreasing, mixture

    case = mixture(3, 2048, 100)
    assert sorted(document for step in case.steps for document in step) == list(range(len(case.lengths)))
    for step in case.steps:
        lengths = {document: case.lengths[document] for document in step}
        assert max(lengths.values()) <= 2048
        assert PACKS * 2048 * 0.98 <= sum(lengths.values()) <= PACKS * 2048
        packs = best_fit_decreasing(lengths, 2 * 2048)
        assert sorted(document for pack in packs for document in pack) == sorted(step)
        assert all(sum(case.lengths[document] for document in pack) <= 2 * 2048 for pack in packs)
    assert mixture(3, 2048, 100) == case
    assert len(case.tokens(4)) == case.lengths[4]
    assert case.tokens(4) == case.tokens(4) != case.tokens(5)


def test_best_fit_leaves_the_least_room():
    from training_cases import best_fit_decreasing

    # 6 and 5 open packs; 4 fits the first best, 3 the second; 2 fits where 5 and 3 are, 1 nowhere else
    lengths = {"a": 6, "b": 5, "c": 4, "d": 3, "e": 2, "f": 1}
    assert best_fit_decreasing(lengths, 10) == [("a", "c"), ("b", "d", "e"), ("f",)]
    with pytest.raises(ValueError, match="document a has 6 tokens, a pack holds 5"):
        best_fit_decreasing(lengths, 5)


def test_each_step_with_a_long_document_has_short_ones_too():
    from training_cases import long_documents

    case = long_documents(3, 4096, 100)
    for step in case.steps:
        lengths = sorted(case.lengths[document] for document in step)
        assert lengths[-1] == 4096
        assert lengths[-2] <= 1024
        assert 0.7 * 4096 < sum(lengths[:-1]) <= 4096


def test_rows_without_documents_come_first_in_a_step():
    """Accumulation counts rows, and gradients are summed on the last one of a step: it must be a real one on each rank."""
    from training_cases import Case
    from training_peers import MicroBatchRows, one_row, rows

    steps = [[(0,), (1,), (2,)], [(3,), (4, 5)]]
    assert rows(steps, 2) == ([(), (0,), (1,), (2,), (), (), (3,), (4, 5)], 2)
    assert rows(steps, 1) == ([(0,), (1,), (2,), (), (3,), (4, 5)], 3)
    with pytest.raises(ValueError, match="a step of 2 micro-batches leaves one of 3 ranks without any"):
        rows(steps, 3)
    case = Case("case", (5, 4, 3, 3, 5, 2), ((0, 1, 2), (3, 4, 5)), 100)
    dataset = MicroBatchRows(case, rows(steps, 2)[0], one_row)
    assert [int((dataset[row]["labels"] != -100).sum()) for row in range(8)] == [0, 4, 3, 2, 0, 0, 2, 5]
    assert case.label_tokens((4, 5)) == 5


def test_a_row_is_filled_up_after_its_documents():
    from training_peers import one_row

    row = {name: column[0].tolist() for name, column in one_row([[1, 2, 3], [4, 5]], multiple=4).items()}
    assert row == {
        "input_ids": [1, 2, 3, 4, 5, 0, 0, 0],
        "labels": [-100, 2, 3, -100, 5, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 4],
    }


def test_packs_attend_within_documents():
    # What the peer that packs is given in place of flash-attn, against each document alone.
    from training_peers.data_parallel import attend_within_documents

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    out, _ = attend_within_documents(None, q, k, v, None, cu_seq_lens_q=torch.tensor([0, 5, 6, 9]), scaling=0.3)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        scores = q[0, :, start:stop] @ k[0, :, start:stop].repeat_interleave(2, 0).mT * 0.3
        scores = scores.masked_fill(~torch.ones(stop - start, stop - start).tril().bool(), float("-inf"))
        expected = scores.softmax(-1) @ v[0, :, start:stop].repeat_interleave(2, 0)
        torch.testing.assert_close(out[0, start:stop].transpose(0, 1), expected, rtol=0, atol=1e-12)


def test_padded_batches_are_even_and_their_padding_is_counted():
    from training_cases import Case
    from training_peers import Settings
    from training_peers.data_parallel import padded

    case = Case("case", (4, 1, 2, 2, 3), ((0, 1, 2, 3, 4),), 100)
    way = padded(case, Settings(8, padded_rows=2))
    assert way.dataset.ordered == [(0, 4), (1,), (2,), (3,)]
    assert way.computed == 2 * 4 + 1 + 2 + 2
    assert [tuple(way.dataset[row]["input_ids"].shape) for row in range(4)] == [(2, 4), (1, 1), (1, 2), (1, 2)]


def test_training_is_compared_with_one_process_and_the_best_of_each_kind():
    from training import summarise
    from training_cases import Case
    from training_ranks import Run

    def ranks(seconds: float, loss: float, computed: int | None = None) -> list[Run]:
        return [Run([taken], taken, [loss, 2.0], [1.0, 1.0], 100, computed) for taken in (seconds, seconds / 2)]

    case = Case("case", (30, 10, 60), ((0,), (1, 2)), 100)
    one_process = [Run([14.0], 14.0, [4.0, 2.0], [1.0, 1.0], 100, None)]
    summaries = summarise(
        case,
        {
            "ours": [ranks(8.0, 4.0), ranks(10.0, 4.0), ranks(7.0, 4.0)],
            "one process": [one_process],
            "padded": [ranks(32.0, 4.0, 400)],
            "packed to 60": [ranks(16.0, 4.0)],
            "packed to 120": [ranks(10.0, 4.0)],
            "accelerate cp=2": [ranks(20.0, 4.0)],
            "DeepSpeed Ulysses sp=2": [ranks(12.0, 4.0)],
            "accelerate cp=2, packed (wrong)": [ranks(1.0, 5.0)],
        },
    )
    ours = summaries["ours"]
    assert ours["tokens per second"] == pytest.approx(70 / 8)
    assert ours["speed over the best correct context-parallel peer's"] == pytest.approx(12 / 8)
    assert ours["speed over padding's"] == pytest.approx(4)
    assert ours["speed over the best packing's"] == pytest.approx(10 / 8)
    assert ours["share of one process's speed times the ranks"] == pytest.approx(7 / 8)
    assert summaries["padded"]["padding share"] == pytest.approx(0.75)
    assert summaries["accelerate cp=2, packed (wrong)"]["difference of loss from plain Trainer's"] == pytest.approx(
        0.25
    )


def test_each_way_of_training_is_offered_by_its_module():
    import importlib

    from training_ranks import WAYS

    for module in ("ours", "data_parallel", "torch_cp"):
        offered = importlib.import_module(f"training_peers.{module}").WAYS
        assert set(offered) == {way for way, its_module in WAYS.items() if its_module == module}


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


def _count_ours() -> list[tuple[int, int]]:
    """For each mode: bytes that benchmarks count, and bytes that the exchange says that it sent."""
    sys.path.insert(0, str(BENCHMARKS))
    import torch.distributed as dist
    from attention_cases import Case
    from attention_peers import World
    from attention_peers.ours import IMPLEMENTATIONS
    from traffic import Traffic

    sys.path.remove(str(BENCHMARKS))
    from hf_longctx.attention.exchange import Exchange

    world, counts = World(dist.get_rank(), dist.get_world_size(), Exchange()), []
    case = Case("one document", (4096,), heads=4, kv_heads=2, head_dim=8)  # long enough for all ranks to share it
    for prepare in IMPLEMENTATIONS.values():
        prepared, before = prepare(case, world), world.exchange.bytes_sent
        q, k, v, _ = (prepared.shard(x) for x in case.inputs())
        with Traffic() as traffic:
            prepared.attend(q.requires_grad_(), k, v).sum().backward()
        counts.append((traffic.sent, world.exchange.bytes_sent - before))
    return counts


def test_ours_is_counted_like_every_peer_in_each_mode(ranks4):
    for counts in ranks4.run(_count_ours):
        assert len(counts) == 3
        for counted, expected in counts:
            assert counted == expected > 0


def test_the_gpu_benchmark_says_so_without_a_gpu(monkeypatch, capsys):
    import attention_gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["attention_gpu.py"])
    assert attention_gpu.main() == 2
    assert "measures on a CUDA GPU, and torch sees none" in capsys.readouterr().err


def test_each_part_of_the_gpu_benchmark_measures_on_a_cpu_too():
    """The same code with a clock, small shapes and the CPU's kernel; flash-attn's stand-in is a contender."""
    from attention_gpu import PARTS, Setting
    from report import sections

    setting = Setting.on(torch.device("cpu"), tiny=True, repeats=1)
    rows, figures = [], {}
    for part, measure in PARTS.items():
        # Long enough that what a kernel takes for any length is little beside the tensors, of 1 and 2 MiB.
        measured = measure(setting, (4096, 8192) if part == "memory" else (1024, 2048))
        rows += measured[0]
        figures |= measured[1]
    assert all(value > 0 for value in figures.values())
    shares = [figures[f"kernels/1024 tokens/{name}/forward, share of the best"] for name in ("ours", "flash-attn 2")]
    assert 0 < min(shares) <= max(shares) <= 1
    assert {row["remark"] for row in rows if row.get("kernel") == "flash-attn 4"} == {
        "cannot: ModuleNotFoundError: No module named 'flash_attn.cute'"
    }
    assert 1.5 <= figures["memory/8192 over 4096 tokens"] <= 2.5
    assert "engine/8 ranks, 2048 tokens/forward and backward over one bare call" in figures
    assert sections(rows, "part").count("| ---") >= len(PARTS)


def test_flops_are_those_that_torch_counts():
    from gpu_contenders import BACKWARD, forward_flops, pairs
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = (1, 4, 32, 16)  # all pairs of 32 queries and keys, 4 heads of 16
    forward = forward_flops(32 * 32, 4, 16)
    assert forward == sdpa_flop_count(shape, shape, shape)
    assert forward * BACKWARD == sdpa_backward_flop_count(shape, shape, shape, shape)
    assert pairs((3, 2)) == 6 + 3


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


# first_run.py


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
