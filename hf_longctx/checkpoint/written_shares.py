"""Who writes what of a checkpoint: all ranks together write each thing once, about equally many bytes each.

Every rank says once which boxes of which weights it holds; from that, all derive the same shares. A weight that all hold
(ddp) is copied and written by one of them. A weight in parts is copied where the parts are and put together by one rank, its
owner, because what transformers loads must be whole; the optimizer's state stays in parts.

    holds          weights q [4, 8]      copies         owns    writes
    rank 0 (zero)  rows 0, 1             rows 0, 1      q       q whole, state of rows 0, 1
    rank 1         rows 2, 3             rows 2, 3              state of rows 2, 3
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_longctx.checkpoint.boxes import Box, Cut
from hf_longctx.checkpoint.rank_messages import Ranks

MODEL_FILE_BYTES = 2**30
"""Weights are spread over as many files as have at least so many bytes, at most one a rank."""
STATE_BYTES = 8
"""of an element, guessed to balance what ranks write: two float32 of Adam."""


@dataclass(frozen=True)
class Shares:
    """Who writes what; the same on all ranks."""

    owner: dict[str, int]
    """weight -> rank that writes it whole"""
    copier: dict[str, dict[Box, int]]
    """weight -> box -> rank that copies this part of the weight"""
    keeper: dict[str, dict[Box, int]]
    """weight -> box -> rank that writes this part of its optimizer state"""

    @property
    def files(self) -> dict[int, str]:
        """Rank -> file of the weights that it owns."""
        owners = sorted(set(self.owner.values()))
        if len(owners) == 1:
            return {owners[0]: "model.safetensors"}
        return {rank: f"model-{number:05d}-of-{len(owners):05d}.safetensors" for number, rank in enumerate(owners, 1)}


def distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out second names of tied weights."""
    first: dict[int, str] = {}
    return {name: tensor for name, tensor in tensors.items() if first.setdefault(id(tensor), name) == name}


def share_out(
    weights: Mapping[str, torch.Tensor], cuts: Mapping[str, list[Cut]], ranks: Ranks, together: bool
) -> Shares:
    """Collective.

    Args:
        weights: of the model, as this rank has them; DTensors in parts.
        cuts: their boxes on this rank.
        together: one rank shall own all weights (adapters are one file).
    """
    boxes_of = ranks.gathered({name: [box for box, _ in of_weight] for name, of_weight in cuts.items()})
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in weights.items()}
    files = 1 if together else min(ranks.world_size, max(1, math.ceil(sum(sizes.values()) / MODEL_FILE_BYTES)))
    loads = [0] * ranks.world_size
    owner: dict[str, int] = {}
    copier: dict[str, dict[Box, int]] = {}
    keeper: dict[str, dict[Box, int]] = {}
    for name in sorted(sizes, key=lambda weight_name: (-sizes[weight_name], weight_name)):
        owner[name] = min(range(files), key=lambda rank: (loads[rank], rank))
        loads[owner[name]] += sizes[name]
    for name in sorted(sizes, key=lambda weight_name: (-sizes[weight_name], weight_name)):
        holders: dict[Box, list[int]] = {}
        for rank, holdings in enumerate(boxes_of):
            for box in holdings[name]:
                holders.setdefault(box, []).append(rank)
        copier[name], keeper[name] = {}, {}
        for box, having in sorted(holders.items()):
            copier[name][box] = owner[name] if owner[name] in having else having[0]
            keeper[name][box] = least = min(having, key=lambda rank: (loads[rank], rank))
            loads[least] += STATE_BYTES * math.prod(box.shape)
    return Shares(owner, copier, keeper)
