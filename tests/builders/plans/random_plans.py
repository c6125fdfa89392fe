"""Hypothesis strategies for what a planner takes: any ranks, any lengths that fit them, any coefficients.

costs()              coefficients from 0 to 10^9, and those of real models
topologies()         1 to 9 ranks, on nodes that divide them or do not, of one speed and memory or of many
steps()              (lengths, topology, cost): one token, all that a rank holds and all that all ranks hold included
chunked_plans()      plans of mode "pipeline", documents in chunks
lognormal_pareto()   lengths of a real mixture, from a seed
"""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from hf_longctx.planner import CPU_CORE, GPU, CostModel, StepPlan, Topology, plan_step
from hf_longctx.planner.cost.cost_model import COEFFICIENTS
from hf_longctx.planner.stages.causal_chunks import most_chunks

TIMES = tuple(name for name in COEFFICIENTS if name not in ("attention_half_tokens", "step_ns"))
"""Coefficients that all of a document's time is proportional to."""

MISTRAL_7B = SimpleNamespace(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=32000,
)
SMOLLM2_135M = SimpleNamespace(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
)
CPU_COST = CostModel.from_config(SMOLLM2_135M, CPU_CORE)
GPU_COST = CostModel.from_config(MISTRAL_7B, GPU)


@cache  # making a strategy, and checking it, takes longer than drawing from it
def magnitudes(highest: int) -> st.SearchStrategy[int]:
    """0, 1, and whole numbers up to `highest` of which each number of digits is as likely as any other."""
    of_digits = [st.integers(1, min(10 ** (d + 1), highest)) for d in range(int(math.log10(highest)) + 1)]
    return st.one_of(st.sampled_from([0, 1]), st.sampled_from(of_digits).flatmap(lambda numbers: numbers))


NODES = st.one_of(st.none(), st.integers(1, 10))
"""Ranks of a node."""
REAL = st.sampled_from([(SMOLLM2_135M, CPU_CORE), (MISTRAL_7B, GPU), (MISTRAL_7B, CPU_CORE)])
WINDOWS = st.one_of(st.none(), st.integers(1, 100))


@st.composite
def costs(draw: st.DrawFn) -> CostModel:
    """One of real models, or any coefficients."""
    ranks_per_node = draw(NODES)
    if draw(st.booleans()):
        model, speed = draw(REAL)
        return CostModel.from_config(model, speed, ranks_per_node=ranks_per_node)
    rate, fixed, window = magnitudes(10**9), magnitudes(10**9), draw(WINDOWS)
    linear = 1 + draw(rate)
    return CostModel(
        attention_ps=draw(rate),
        linear_ps=linear,
        inside_ps=draw(rate),
        between_ps=draw(rate),
        message_ns=draw(fixed),
        document_ns=draw(fixed),
        micro_batch_ns=draw(fixed),
        attention_half_tokens=draw(st.integers(0, 500)),
        ranks_per_node=ranks_per_node,
        windowed_ps=1 + draw(rate) if window else 0,
        window=window,
        label_ps=min(draw(rate), linear - 1),
        state_ns=draw(fixed),
    )


@st.composite
def topologies(draw: st.DrawFn, max_ranks: int = 9, equal: bool | None = None) -> Topology:
    """`equal`: whether all ranks are alike; None: either."""
    world_size = draw(st.integers(1, max_ranks))
    capacity = draw(st.integers(1, 60))
    equal = draw(st.booleans()) if equal is None else equal
    speed = draw(factors(world_size, 1)) if not equal else None
    memory = draw(factors(world_size, -(-1000 // capacity))) if not equal else None
    return Topology(
        world_size,
        capacity,
        ranks_per_node=draw(NODES),
        ulysses_degree=draw(st.integers(1, 4)),
        speed=speed,
        memory=memory,
        stages=draw(st.integers(1, 4)),
    )


@cache
def factors(world_size: int, least: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    """Per mille: two or three generations of ranks, or each its own; sometimes none."""
    generation = st.sampled_from([factor for factor in (250, 500, 730, 1000, 1600) if factor >= least] or [least])
    factor = st.one_of(generation, generation, st.integers(least, max(least, 3000)))
    return st.one_of(st.none(), st.lists(factor, min_size=world_size, max_size=world_size).map(tuple))


@st.composite
def lengths_for(draw: st.DrawFn, topology: Topology, max_documents: int = 40) -> np.ndarray:
    """int64 [documents]"""
    most = topology.tokens
    edges = st.sampled_from([1, most, topology.capacity, int(topology.capacities.min())])
    length = st.one_of(st.integers(1, min(most, 8)), st.integers(1, most), edges.map(lambda edge: min(edge, most)))
    some = st.lists(length, min_size=1, max_size=max_documents)
    same = st.tuples(length, st.integers(1, max_documents)).map(lambda both: [both[0]] * both[1])
    return np.array(draw(st.one_of(some, some, same)), np.int64)


@st.composite
def steps(draw: st.DrawFn, max_ranks: int = 9, equal: bool | None = None) -> tuple[np.ndarray, Topology, CostModel]:
    """(lengths, topology, cost)"""
    topology = draw(topologies(max_ranks, equal))
    return draw(lengths_for(topology)), topology, draw(costs())


def lognormal_pareto(count: int, seed: int, longest: int) -> np.ndarray:
    """Lengths with a median of about 1000 tokens and 4 % of a Pareto tail from 16K up to 2M."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(math.log(1000), 1.2, count))
    tail = rng.random(count) < 0.04
    share = 1 - (16384 / 2**21) ** 0.95
    lengths[tail] = 16384 / (1 - rng.random(tail.sum()) * share) ** (1 / 0.95)
    return np.clip(lengths, 32, min(longest, 2**21)).astype(np.int64)


@st.composite
def chunked_plans(draw: st.DrawFn, max_ranks: int = 6) -> StepPlan:
    """Draw plans of mode "pipeline", some of whose micro-batches of one document run in chunks."""
    lengths, topology, cost = draw(steps(max_ranks))
    plan = plan_step(lengths, topology, cost, "pipeline")
    linear_tokens = draw(st.one_of(st.just(0), st.integers(0, 1000)))
    chunks = np.ones(len(plan.cost), np.int64)
    for i in np.flatnonzero(np.diff(plan.first_document) == 1) if topology.uniform else []:
        most = most_chunks(int(plan.length[plan.first_document[i]]), int(plan.members[i]), linear_tokens)
        chunks[i] = draw(st.integers(1, min(most, 5)))
    return replace(plan, chunks=chunks, linear_tokens=linear_tokens, lower_bound=1)


def cut_in_chunks(plan: StepPlan) -> StepPlan:
    """Cut every document that is alone in its micro-batch into up to three chunks."""
    chunks = plan.chunks.copy()
    for i in range(len(chunks)):
        first, after = plan.first_document[i : i + 2]
        if after - first == 1:
            chunks[i] = min(3, max(1, plan.length[first] // plan.members[i] // 2))
    return replace(plan, chunks=chunks)
