"""The benchmark of attention across ranks: its cases, reference, peak memory and figures."""

import numpy as np
import pytest
import torch


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
