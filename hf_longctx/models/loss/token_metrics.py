"""Token accuracy and entropy of predictions, from the logits that the chunked cross-entropy has at hand for a moment.

    mean_token_accuracy   share of label tokens to which the model gives the largest logit; of equal ones the first counts
    entropy               mean over label tokens of -sum_v p(v) ln p(v), in nats, p the model's distribution of the next token

Each chunk's counts are added to three sums, so that what they make over ranks and micro-batches is exact, however documents are
packed, split and cut. A chunk is taken PIECE_ROWS rows at a time: beside the chunk itself a few pieces exist, never a second one.
The host waits for nothing.

Under tensor parallelism ranks hold some logits of each token. For a piece of t tokens they send t maxima, t token ids and t
entropies; all ranks of the group get the same sums. Otherwise nothing is sent here: training adds the sums to what ranks sum up
anyway.

Shapes: t rows, V vocabulary, v of it on this rank.
"""

import math

import torch
import torch.distributed as dist

from hf_longctx.models.loss.cross_entropy import VocabularySlice

PIECE_ROWS = 64
"""Rows whose probabilities exist at once: 1/16 of a chunk as it is by default."""
NAMES = ("mean_token_accuracy", "entropy")
"""Keys of logs, as TRL's trainers name them."""
SUMS = 3
"""Label tokens predicted right, their entropies in nats, label tokens."""


class TokenMetrics:
    """Sums of one rank, until they are taken.

    Args:
        device: where logits are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(SUMS, dtype=torch.float64, device=device)

    def observe(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        log_normalizer: torch.Tensor,
        part: VocabularySlice | None = None,
    ) -> None:
        """Count right predictions and add up entropies of a chunk of rows that all have a label.

        Args:
            logits: float [t, V], or [t, v] with `part`; not changed.
            labels: int64 [t], of the whole vocabulary.
            log_normalizer: [t, 1], log-sum-exp of each row over the whole vocabulary.
            part: which logits these are, where other ranks hold the rest.
        """
        pieces = (tensor.split(PIECE_ROWS) for tensor in (logits, labels, log_normalizer))
        for piece, target, normalizer in zip(*pieces, strict=True):
            # entr(p) is -p ln p, and 0 where a class has left a token out with a logit of -inf.
            entropies = torch.special.entr((piece - normalizer).exp_()).sum(-1)
            if part is None:
                predicted = piece.argmax(-1)
            else:
                predicted = _largest_over_vocabulary(piece, part)
                dist.all_reduce(entropies, group=part.group)
            self._sums[0] += (predicted == target).sum()
            self._sums[1] += entropies.double().sum()
        self._sums[2] += len(logits)

    def take(self) -> torch.Tensor:
        """float64 [3]: label tokens predicted right, entropies, label tokens, since it was last called."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums


def _largest_over_vocabulary(logits: torch.Tensor, part: VocabularySlice) -> torch.Tensor:
    """int64 [t]: the token with the largest logit on any rank of the group, from this rank's [t, v]; of equal ones the first."""
    if logits.shape[1]:
        own, index = logits.max(-1)[0], logits.argmax(-1) + part.first
    else:
        own = logits.new_full((len(logits),), -math.inf)
        index = torch.full((len(logits),), torch.iinfo(torch.int64).max, device=logits.device)
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
    predicted = torch.where(own == largest, index, torch.iinfo(torch.int64).max)
    dist.all_reduce(predicted, dist.ReduceOp.MIN, group=part.group)
    return predicted


def forward_arguments(token_metrics: TokenMetrics | None) -> dict[str, TokenMetrics]:
    """Return what a patched model's forward is given for it: nothing for None."""
    return {} if token_metrics is None else {"token_metrics": token_metrics}


def means(sums: torch.Tensor) -> dict[str, float]:
    """Return the metrics of float64 [3], summed over ranks; empty where there was no label or a logit was not finite."""
    right, entropies, tokens = sums.tolist()
    if not tokens or not math.isfinite(entropies):
        return {}
    return dict(zip(NAMES, (right / tokens, entropies / tokens), strict=True))
