"""Weights whole, from the parts that ranks hold: each goes to the rank that shall have it."""

from collections.abc import Mapping

import torch

from hf_longctx.checkpoint.boxes import Box, cuts, views, whole_box
from hf_longctx.checkpoint.rank_messages import Ranks
from hf_longctx.checkpoint.written_shares import Shares, share_out

Parts = dict[str, dict[Box, torch.Tensor]]
"""Name -> what this rank has copied of it, in host memory."""


def gathered(weights: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """All weights whole, in host memory of rank 0; nothing on the others. Collective.

    Args:
        weights: of the model, as this rank has them: in parts, or without memory (meta) where it holds nothing.
    """
    own_cuts = {name: cuts(tensor) for name, tensor in weights.items()}
    shares = share_out(weights, own_cuts, ranks, together=True)
    copies: Parts = {}
    for name, tensor in weights.items():
        mine = [cut for cut in own_cuts[name] if shares.copier[name][cut[0]] == ranks.rank]
        copies[name] = {box: view.cpu() for box, view in views(tensor, mine)} if mine else {}
    return whole_weights(weights, shares, copies, ranks)


def whole_weights(
    weights: Mapping[str, torch.Tensor], shares: Shares, copies: Parts, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """The weights that this rank owns; collective where any comes from another rank. `weights` has one order on all ranks."""
    me, world_size = ranks.rank, ranks.world_size
    own = {
        name: copies[name][box]
        for name, box in ((name, whole_box(tensor)) for name, tensor in weights.items())
        if shares.owner[name] == me == shares.copier[name].get(box)
    }
    moved = [
        (name, box, source, shares.owner[name])
        for name in weights
        for box, source in sorted(shares.copier[name].items())
        if source != shares.owner[name] or len(shares.copier[name]) > 1
    ]
    if not moved:
        return own
    sent = [
        [copies[name][box] for name, box, source, to in moved if (source, to) == (me, rank)]
        for rank in range(world_size)
    ]
    expected = [
        [(name, box) for name, box, source, to in moved if (source, to) == (rank, me)] for rank in range(world_size)
    ]
    flat = [tensor.reshape(-1).view(torch.uint8) for tensors in sent for tensor in tensors]
    sizes = {name: weights[name].element_size() for name in weights}
    received = ranks.exchanged(
        torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8),
        [sum(tensor.nbytes for tensor in tensors) for tensors in sent],
        [sum(box.elements * sizes[name] for name, box in parts) for parts in expected],
    )
    at = 0
    for name, box in (part for parts in expected for part in parts):
        stop = at + box.elements * sizes[name]
        if name not in own:
            own[name] = torch.empty(weights[name].shape, dtype=weights[name].dtype)
        # Where it begins need not be a multiple of its element's size.
        own[name][box.slices] = received[at:stop].clone().view(weights[name].dtype).reshape(box.shape)
        at = stop
    return own
