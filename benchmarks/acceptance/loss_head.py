"""The loss head beside its matrix products, and the backward of rows in another order beside a gather.

head    chunked_cross_entropy of hidden states, forward and backward, over three bare products: logits, the gradient of
        hidden states and that of the weight, each over all rows at once where they fit
rows    x[rows] for a permutation: its backward adds up by index, where a gather by the inverse would do
"""

from __future__ import annotations

import torch
from gpu_meter import Meter

from acceptance.record import Bench
from hf_longctx.models.loss.cross_entropy import chunked_cross_entropy

CHUNKS = (1024, 2048, 8192)


def measure(bench: Bench) -> None:
    """Both."""
    meter = Meter(bench.device)
    _head(bench, meter)
    _rows(bench, meter)


def _head(bench: Bench, meter: Meter) -> None:
    tokens, width, vocabulary = (256, 64, 512) if bench.tiny else (8192, 4096, 128256)
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    hidden = torch.randn(tokens, width, dtype=dtype, device=bench.device, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, device=bench.device, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=bench.device)
    known = torch.arange(tokens, device=bench.device)
    scores = torch.randn(tokens, vocabulary, dtype=dtype, device=bench.device)
    h, w = hidden.detach(), weight.detach()

    def products() -> None:
        torch.mm(h, w.t(), out=scores)
        torch.mm(scores, w)
        torch.mm(scores.t(), h)

    chunks = [max(16, chunk // 64) for chunk in CHUNKS] if bench.tiny else CHUNKS

    def head(chunk: int) -> None:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, label_rows=known)
        torch.autograd.grad(loss, (hidden, weight))

    calls = {"products": products} | {str(chunk): lambda chunk=chunk: head(chunk) for chunk in chunks}
    seconds = meter.medians(calls, 3)
    rows, figures = [], {}
    for chunk in chunks:
        ratio = seconds[str(chunk)] / seconds["products"]
        peak = meter.peak_bytes(calls[str(chunk)])
        figures[f"head/{chunk} rows a chunk, over its products"] = ratio
        rows.append(
            {
                "rows a chunk": str(chunk),
                "ms": f"{seconds[str(chunk)] * 1e3:.2f}",
                "over its three products": f"{ratio:.2f}",
                "peak MiB": f"{peak / 2**20:.1f}",
            }
        )
    figures["head/least over its products"] = min(figures.values())
    figures["head/chunk of the default, over its products"] = figures[
        f"head/{chunks[0]} rows a chunk, over its products"
    ]
    bench.table(f"Loss head, {tokens} tokens, {vocabulary} words", rows, figures)


def _rows(bench: Bench, meter: Meter) -> None:
    tokens, width = (256, 64) if bench.tiny else (32768, 4096)
    x = torch.randn(tokens, width, device=bench.device, requires_grad=True)
    grad = torch.randn(tokens, width, device=bench.device)
    order = torch.randperm(tokens, device=bench.device)
    back = torch.argsort(order)
    taken = x[order]
    calls = {
        "by index": lambda: torch.autograd.grad(taken, x, grad, retain_graph=True),
        "by the inverse": lambda: grad[back],
    }
    seconds = meter.medians(calls, 3)
    ratio = seconds["by index"] / seconds["by the inverse"]
    cells = {f"{name}, ms": f"{median * 1e3:.3f}" for name, median in seconds.items()}
    bench.table(
        "Backward of x[rows]", [cells | {"ratio": f"{ratio:.2f}"}], {"rows/backward by index over a gather": ratio}
    )
