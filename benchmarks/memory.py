"""Peak memory of attention over one long document on one process: is it linear in its tokens?

    python benchmarks/memory.py --json benchmarks/results/memory.json --check linear-memory        # 3 minutes
    python benchmarks/memory.py --tokens 8192                                        # a quick look

Forward and backward of one attention layer (layout_attention, float32, 2 heads of 64) of `--tokens` and of half as many
tokens, each in a fresh process with one computing thread: plain causal attention, with ALiBi, and with a sliding window.
The peak is the largest resident set of the process beyond what it held before its inputs were made (peak_memory.py), so
inputs, output, gradients, everything kept for backward, and all scratch. Twice the tokens should hold twice as much; a
mask or scores of tokens x tokens would hold four times as much: at 65536 tokens, 4 GiB of booleans, or 32 GiB of scores.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from peak_memory import peak_bytes_of
from ranks import on_ranks
from report import conclude, parser

from hf_longctx.attention.engine import layout_attention
from hf_longctx.layouts.layout import Layout, Segment

HEADS, HEAD_DIM = 2, 64
WARM_UP_TOKENS = 64


def variants(tokens: int) -> dict[str, dict[str, Any]]:
    """Name -> what layout_attention is given beyond q, k, v and the layout. The window is a sixteenth of `tokens`, in
    both sizes: 4096 of 65536."""
    return {"causal": {}, "ALiBi": {"alibi_slopes": torch.tensor([2**-4, 2**-8])}, "window": {"window": tokens // 16}}


@dataclass(frozen=True)
class Held:
    """What one process held."""

    peak_bytes: int
    tensor_bytes: int
    """of q, k, v, the output and their four gradients: what is there whatever the attention does"""


def memory_of(tokens: int, options: dict[str, Any]) -> Held:
    """Runs forward and backward over one document in this process."""
    _run(min(tokens, WARM_UP_TOKENS), options)
    peak, tensor_bytes = peak_bytes_of(lambda: _run(tokens, options))
    return Held(peak, tensor_bytes)


def _run(tokens: int, options: dict[str, Any]) -> int:
    layout = Layout({0: (Segment(0, 0, tokens),)})
    q, k, v, grad_out = (torch.randn(tokens, HEADS, HEAD_DIM) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = layout_attention(q, k, v, layout, **options)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    return sum(x.nbytes for x in (*leaves, grad_out, out, *gradients))


def compare(tokens: int, names: list[str]) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows of the table, and figures. Each size of each variant is a process of its own."""
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    for variant in names:
        half, whole = (on_ranks(memory_of, 1, size, variants(tokens)[variant])[0] for size in (tokens // 2, tokens))
        ratio = whole.peak_bytes / half.peak_bytes
        figures |= {
            f"{variant}/peak bytes of {tokens // 2} tokens": half.peak_bytes,
            f"{variant}/peak bytes of {tokens} tokens": whole.peak_bytes,
            f"{variant}/{tokens} over {tokens // 2} tokens": ratio,
        }
        rows.append(
            {
                "attention": variant,
                "tokens": str(tokens),
                "peak / half the tokens": f"{ratio:.2f}",
                "peak / inputs, output and gradients": f"{whole.peak_bytes / whole.tensor_bytes:.2f}",
                "peak MiB": f"{whole.peak_bytes / 2**20:.0f}",
                "of half the tokens": f"{half.peak_bytes / 2**20:.0f}",
            }
        )
    return rows, figures


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--tokens", type=int, default=65536, help="give the longer document so many tokens (default: %(default)s)"
    )
    options.add_argument(
        "--only",
        nargs="+",
        choices=variants(16),
        default=list(variants(16)),
        help="measure these variants (default: all)",
    )
    arguments = options.parse_args()
    if arguments.tokens < 16 or arguments.tokens % 2:
        options.error(f"--tokens {arguments.tokens} must be even, and at least 16")
    load = os.getloadavg()[0]
    rows, figures = compare(arguments.tokens, arguments.only)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
