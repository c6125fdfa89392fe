"""The benchmark of attention on a GPU, run on a CPU, and the stand-in for flash-attn."""

import sys

import pytest
import torch


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
