"""Loss by length of document: whether a model learns its long documents as it learns its short ones, at hardly any cost.

The chunked cross-entropy has the loss of every label token at hand for a moment. Each is added to the sum of its
document's bucket, so that sums over ranks and micro-batches are exact, however documents are packed, split and cut.
A router's auxiliary loss is left out. It takes 20 microseconds per 1,024 label tokens on a CPU core.

    bucket   to_256  to_1K  to_4K  to_16K  to_64K  to_256K  to_1M  over_1M        tokens of the document, K = 1024

Nothing is sent here: training adds these sums to what ranks sum up anyway (training/trainer.py).
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from hf_longctx.attention.on_device import on_device
from hf_longctx.layouts.layout import Layout

EDGES = (2**8, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
"""Tokens of the longest document of each bucket but the last. Each is four times the one before: documents of two powers of
two together, so that most steps have some of each."""
BUCKETS = ("to_256", "to_1K", "to_4K", "to_16K", "to_64K", "to_256K", "to_1M", "over_1M")


class LossByLength:
    """Sums of one rank, until they are taken.

    Args:
        device: where losses are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, len(BUCKETS), dtype=torch.float64, device=device)

    def observer(
        self, layout: Layout, rank: int, lengths: Mapping[int, int] | None = None
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Takes in rows (int64 [n]) of a rank's shard of a layout, and the loss of each (float [n]). `lengths`: tokens of each
        document, where the layout is a chunk of it."""
        shard, lengths = layout.shard(rank), lengths or layout.doc_lengths
        bucket = np.searchsorted(EDGES, [lengths[segment.doc] for segment in shard]).astype(np.uint8)
        of_token = on_device(np.repeat(bucket, [len(segment) for segment in shard]), self._sums.device)

        def observe(rows: torch.Tensor, losses: torch.Tensor) -> None:
            losses = losses.detach().double()
            self._sums.index_add_(1, of_token[rows].long(), torch.stack([losses, torch.ones_like(losses)]))

        return observe

    def take(self) -> torch.Tensor:
        """float64 [2, buckets]: the losses of all label tokens since it was last called, summed, and how many these were."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums
