"""hf_longctx: the planner's layouts, which training and inference run: direct exchange, Ulysses, or both."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from attention_cases import Case
from transformers import LlamaConfig

from attention_peers import Prepare, Prepared, World, need, need_groups
from hf_longctx.attention.engine import layout_attention
from hf_longctx.layouts.layout import Layout
from hf_longctx.planner import CostModel, StepPlan, Topology, plan_step
from hf_longctx.precision import cpu_core, cpu_kind


def prepare(case: Case, world: World, ulysses: int | None) -> Prepared:
    """The planner's layouts, as if the case were a step or a call of `score`: micro-batches one after another, in their order.

    Args:
        ulysses: most ranks that split heads; 1 for the direct exchange alone, None for all ranks.
    """
    if ulysses is not None:
        need_groups(world, ulysses)
    plan = planned(case, world.size, world.size if ulysses is None else ulysses)
    need(np.bincount(plan.rank, minlength=world.size).all(), "a rank has nothing to do")
    layouts = [layout for _, layout in plan.layouts(world.rank)]
    rows = [rows_of(layout, case, world.rank) for layout in layouts]
    counts = [len(indices) for indices in rows]
    run = partial(layout_attention, exchange=world.exchange, alibi_slopes=case.slopes)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(layouts) == 1:  # of several, the gradients are put together, which no step has to do
            return run(q, k, v, layouts[0])
        parts = zip(*(x.split(counts) for x in (q, k, v)), layouts, strict=True)
        return torch.cat([run(*qkv, layout) for *qkv, layout in parts])

    return Prepared(lambda x: x[torch.cat(rows)], attend)


def planned(case: Case, ranks: int, ulysses: int = 1) -> StepPlan:
    """The plan of a case, by what attention costs in one layer of its heads on this machine's cores. Nothing else is measured,
    so nothing else has a cost; ranks hold as much as they are given, as `score` without a capacity."""
    model = LlamaConfig(
        hidden_size=case.heads * case.head_dim,
        num_hidden_layers=1,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
    )
    costs = CostModel.from_config(model, cpu_core(cpu_kind(), bf16=False))
    of_attention = replace(costs, linear_ps=1, label_ps=0, micro_batch_ns=0)
    return plan_step(np.array(case.lengths), Topology(ranks, case.tokens, ulysses_degree=ulysses), of_attention)


def rows_of(layout: Layout, case: Case, rank: int) -> torch.Tensor:
    """Return which rows of all documents, lying end to end, a rank holds: int64 [its tokens]."""
    return torch.from_numpy(np.array(case.boundaries)[layout.documents(rank)] + layout.positions(rank))


IMPLEMENTATIONS: dict[str, Prepare] = {
    "ours": partial(prepare, ulysses=1),
    "ours Ulysses": partial(prepare, ulysses=None),
    "ours Ulysses 2 x direct": partial(prepare, ulysses=2),
}
