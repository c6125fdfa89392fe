"""ALiBi as one number per key. No matrix of biases is ever built.

ALiBi (Press et al., arXiv 2108.12409) takes slope * (distance + x - y) from the score of query row x and key row y of
a block. A softmax does not change when a constant is added to a row, so the bias of key y may be counted from any
origin; the block's last key is taken:

    slope * (y - last)                   is added to the scores of key y:        [Hq, Tk], never positive
    slope * (last - x - distance)        is then added to the row's lse:         [Hq, Tq]

The bias has the size slope * rows of the block, and rounding of float32 scores grows with it: causal blocks are kept
small (`Kernel.alibi_tile`). In a full block, keys far from its end weigh nothing, so that their rounding does not
matter.
"""

import torch

from hf_longctx.layouts.blocks import Block


def key_bias(block: Block, slopes: torch.Tensor) -> torch.Tensor:
    """[Hq, Tk] in the dtype of slopes [Hq]: what is added to the scores of a block's keys."""
    rows = torch.arange(block.k_start - block.k_stop + 1, 1, dtype=slopes.dtype, device=slopes.device)
    return slopes.unsqueeze(1) * rows


def lse_shift(block: Block, slopes: torch.Tensor) -> torch.Tensor:
    """[Hq, Tq] in the dtype of slopes [Hq]: what is then added to the log-sum-exp of a block's rows."""
    last = block.k_stop - block.k_start - 1 - block.distance
    rows = torch.arange(last, last - (block.q_stop - block.q_start), -1, dtype=slopes.dtype, device=slopes.device)
    return slopes.unsqueeze(1) * rows
