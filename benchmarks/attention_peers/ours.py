"""hf_longctx: a balanced layout, run by the attention engine: direct exchange, Ulysses, or both."""

from functools import partial

import numpy as np
import torch
from attention_cases import Case

from attention_peers import Prepare, Prepared, World, need_groups
from hf_longctx.attention.engine import layout_attention
from hf_longctx.balance import balanced


def prepare(case: Case, world: World, ulysses: int | None) -> Prepared:
    """`ulysses`: ranks of an inner group, 1 for the direct exchange alone, None for all ranks."""
    if ulysses is not None:
        need_groups(world, ulysses)
    degree = world.size if ulysses is None else ulysses
    layout = balanced(case.lengths, range(world.size), ulysses=degree)
    first_token = np.array(case.boundaries)[layout.documents(world.rank)]
    rows = torch.from_numpy(first_token + layout.positions(world.rank))
    attend = partial(layout_attention, layout=layout, exchange=world.exchange, alibi_slopes=case.slopes)
    return Prepared(lambda x: x[rows], attend)


IMPLEMENTATIONS: dict[str, Prepare] = {
    "ours": partial(prepare, ulysses=1),
    "ours Ulysses": partial(prepare, ulysses=None),
    "ours Ulysses 2 x direct": partial(prepare, ulysses=2),
}
