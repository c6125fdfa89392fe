"""hf_longctx: a layout, run by the attention engine."""

import numpy as np
import torch
from attention_cases import Case

from attention_peers import Prepare, Prepared, World
from hf_longctx.attention.engine import layout_attention
from hf_longctx.layout import Layout, Segment, zigzag


def layout_of(case: Case, ranks: int) -> Layout:
    """One document is cut zigzag over all ranks; several stay whole, the longest first to the rank with least to do."""
    if len(case.lengths) == 1:
        return Layout(zigzag(0, case.tokens, range(ranks)))
    shards: dict[int, list[Segment]] = {rank: [] for rank in range(ranks)}
    work = [0] * ranks
    for doc in sorted(range(len(case.lengths)), key=lambda doc: -case.lengths[doc]):
        rank = work.index(min(work))
        shards[rank].append(Segment(doc, 0, case.lengths[doc]))
        work[rank] += case.lengths[doc] ** 2
    return Layout(shards)


def prepare(case: Case, world: World) -> Prepared:
    layout = layout_of(case, world.size)
    first_token = np.array(case.boundaries)[layout.documents(world.rank)]
    rows = torch.from_numpy(first_token + layout.positions(world.rank))
    return Prepared(lambda x: x[rows], lambda q, k, v: layout_attention(q, k, v, layout, world.exchange))


IMPLEMENTATIONS: dict[str, Prepare] = {"ours": prepare}
