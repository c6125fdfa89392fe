"""NEFTune (arXiv 2310.05914) for planned steps: noise on the embeddings that is the same under any plan.

transformers draws it from the device's generator for whatever row of tokens comes by, and scales it by that row's length: here
a row holds parts of several documents, so that noise and its size would depend on the plan. Instead, every element is a
function of what it belongs to, and of nothing else:

    noise[token, h] = alpha / sqrt(L * H) * u(seed, epoch, step, document, position, h)          u uniform in [-1, 1)

with L tokens in the document and H hidden size, as the paper has it for one document alone. u comes from integers that are
mixed (splitmix64's finaliser) and not from a generator with a state, so that any rank computes any part of it: whatever the
number of ranks, the split, chunks and stages of a pipeline, and however often a layer is computed again. The document is
numbered within the global batch, which is the same under any plan, also when a run is resumed on other ranks.

Shapes: T tokens of this rank, H hidden size. Nothing is sent between ranks.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hf_longctx.attention.exchange import own_rank
from hf_longctx.attention.on_device import on_device
from hf_longctx.data.collator import RankStep
from hf_longctx.data.step_plans import signed_hash
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.wrappers import language_model_of

ROWS = 1024
"""Tokens whose noise is mixed at once: integers take 8 bytes for each element."""
STRIDE = -7046029254386353131
"""An odd constant (2^64 over the golden ratio, as a signed integer), which sends neighbouring counts far apart."""
FACTORS = (-4658895280553007687, -7723592293110705685)
"""Factors of splitmix64's finaliser, as signed integers."""


class EmbeddingNoise:
    """Adds the noise of a run's steps.

    Args:
        alpha: TrainingArguments' neftune_noise_alpha.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._key = 0
        self._lengths: dict[int, int] = {}
        self._held: tuple[Layout, int] | None = None

    def begin_step(self, step: RankStep, seed: int) -> None:
        """Begin the noise of a step. The seed is the run's, which a resumed run keeps."""
        self._key = signed_hash(f"neftune {seed} {step.position[0]} {step.position[1]}")
        self._lengths = dict(zip(step.plan.doc.tolist(), step.plan.length.tolist()))

    def begin_forward(self, model: Any, inputs: Any, keywords: dict[str, Any]) -> None:
        """A hook before the model's forward, which learns whose tokens come."""
        layout = keywords.get("layout")
        self._held = None if layout is None else (layout, own_rank(layout, keywords.get("exchange")))

    def after_embeddings(self, embeddings: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """A hook after the embeddings' forward: [1, T, H] -> [1, T, H]."""
        if not embeddings.training or self._held is None:
            return output
        layout, rank = self._held
        shard = layout.shard(rank)
        documents = np.repeat([segment.doc for segment in shard], [len(segment) for segment in shard])
        lengths = np.array([self._lengths[doc] for doc in documents.tolist()], np.float64)
        scale = torch.from_numpy(self.alpha / np.sqrt(lengths * output.shape[-1])).float()
        positions = torch.from_numpy(layout.positions(rank)).long()
        tokens = _mixed(_mixed(self._key + torch.from_numpy(documents).long() * STRIDE) + positions * STRIDE)
        tokens, scale = (on_device(numbers, output.device) for numbers in (tokens, scale))
        return output + uniform_noise(tokens, scale, output.shape[-1]).to(output)


def uniform_noise(tokens: torch.Tensor, scale: torch.Tensor, hidden: int) -> torch.Tensor:
    """float32 [T, hidden], uniform in [-scale, scale).

    Args:
        tokens: int64 [T]: what stands for each token.
        scale: float32 [T].
    """
    columns = torch.arange(hidden, device=tokens.device) * STRIDE
    rows = []
    for some, size in zip(tokens.split(ROWS), scale.split(ROWS)):
        bits = _shifted(_mixed(some[:, None] + columns), 40)  # 24 bits, which float32 holds
        rows.append((bits.float() / 2**23 - 1) * size[:, None])
    return torch.cat(rows)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """int64, element by element: every bit of a result depends on all bits of its number. Products wrap around."""
    numbers = (numbers ^ _shifted(numbers, 30)) * FACTORS[0]
    numbers = (numbers ^ _shifted(numbers, 27)) * FACTORS[1]
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift bits to the right, with zeros coming in: torch would repeat the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


@contextlib.contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[EmbeddingNoise | None]:
    """Add noise to the embeddings of training forwards over a layout while the context lasts; none if alpha is None or 0.

    Args:
        model: patched; may be wrapped (PEFT), cut into stages, and sharded with FSDP2.
    """
    if alpha is None or not math.isfinite(alpha) or alpha == 0:
        yield None
        return
    noise = EmbeddingNoise(alpha)
    language_model = language_model_of(model)
    handles = [
        model.register_forward_pre_hook(noise.begin_forward, with_kwargs=True),
        language_model.get_input_embeddings().register_forward_hook(noise.after_embeddings),
    ]
    try:
        yield noise
    finally:
        for handle in handles:
            handle.remove()
