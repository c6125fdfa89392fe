"""ByteScale's experiments as we replay them: the parameters against the times that they are taken from, equation 3 by hand,
and what must hold between methods on any documents. The comparison with the paper's figures is benchmarks/simulator.py.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bytescale_replay import (
    CAPACITY,
    LONGEST_CONTEXT,
    LONGEST_SECONDS,
    RANKS,
    RANKS_PER_NODE,
    RING_SECONDS,
    SHORTEST_CONTEXT,
    STEP_TOKENS,
    OffloadTopology,
    Setting,
    batch,
    bound,
    methods,
    replay,
)
from hf_longctx.planner import Topology
from hf_longctx.planner.baselines.static_cp import context_degree, plan_static_cp
from hf_longctx.simulator.play import play

SETTING = Setting()


def micro_batch_seconds(lengths: np.ndarray) -> float:
    """Return the seconds of one pack of 2M tokens on 256 ranks."""
    topology = Topology(RANKS, CAPACITY, ranks_per_node=RANKS_PER_NODE)
    plan = plan_static_cp(lengths, topology, SETTING.cost, context=LONGEST_CONTEXT)
    assert plan.members.tolist() == [256]
    return play(plan, SETTING.config, SETTING.machine).parts["micro-batches"]


def test_the_case_studys_micro_batches_take_what_they_took():
    """Launches and messages come on top of what the parameters are taken from: 32 layers, 255 messages of 30 us."""
    assert micro_batch_seconds(np.array([LONGEST_CONTEXT])) == pytest.approx(LONGEST_SECONDS, rel=0.01)
    short = np.full(LONGEST_CONTEXT // 4096, 4096)
    assert micro_batch_seconds(short) == pytest.approx(RING_SECONDS, rel=0.02)


def test_equation_3_by_hand():
    """Act of 2 layers stays, (1 - r) of 30; at 64K tokens forward hides 0.545, at other lengths in proportion to its time."""
    cost = SETTING.cost
    growing = cost.attention_ps
    fixed = cost.linear_ps + growing * cost.attention_half_tokens
    topology = OffloadTopology(
        RANKS, CAPACITY, layers=32, most_offload=0.5, seconds_per_token=(float(fixed), float(growing))
    )
    lengths = np.array([1, CAPACITY, CAPACITY + 1, 16384, 65536, LONGEST_CONTEXT])
    hidden = 0.545 * (fixed + growing * 16384) / (fixed + growing * 65536)
    assert 0.2 < hidden < 0.4
    expected = [
        1,
        1,
        math.ceil((2 + (1 - 0.545 * (fixed + growing * 8193) / (fixed + growing * 65536)) * 30) / 32 * 8193 / 8192),
        math.ceil((2 + (1 - hidden) * 30) / 32 * 2),
        math.ceil(17 / 32 * 8),
        math.ceil(17 / 32 * 256),
    ]
    assert topology.fewest_ranks(lengths).tolist() == expected
    without = replace(topology, most_offload=0.0)
    plain = Topology(RANKS, CAPACITY)
    assert (without.fewest_ranks(lengths) == plain.fewest_ranks(lengths)).all()


@pytest.mark.parametrize("dataset", ["github", "byted"])
@pytest.mark.parametrize("context", [SHORTEST_CONTEXT, LONGEST_CONTEXT])
def test_every_method_trains_on_every_document(dataset: str, context: int):
    lengths = batch(dataset, 3, context)
    assert STEP_TOKENS * 0.98 < lengths.sum() <= STEP_TOKENS
    for name, method in methods(SETTING, context).items():
        plan = method.planner(lengths)
        assert sorted(plan.doc.tolist()) == list(range(len(lengths))), name
        assert (plan.length == lengths[plan.doc]).all(), name
        assert plan.exchange == ("direct" if name == "ours" else "ring"), name
        if name == "static packing":
            assert set(plan.members.tolist()) == {context // CAPACITY}
            assert len(plan.cost) == STEP_TOKENS // context
        elif name.startswith("+"):
            assert plan.ranks_of_document.max() < -(-lengths.max() // CAPACITY)
        else:
            plan.check(lengths)


def test_batches_do_not_depend_on_how_many_there_are():
    assert (batch("github", 5, LONGEST_CONTEXT) == batch("github", 5, LONGEST_CONTEXT)).all()
    assert len(batch("github", 5, LONGEST_CONTEXT)) != len(batch("github", 6, LONGEST_CONTEXT))


@pytest.mark.parametrize("dataset", ["github", "byted"])
def test_ours_is_the_fastest_and_nothing_beats_the_bound(dataset: str):
    replayed = replay(SETTING, dataset, LONGEST_CONTEXT, 6)
    speeds = {name: result.tokens_per_second for name, result in replayed.items()}
    best = bound(SETTING, dataset, LONGEST_CONTEXT, 6)
    assert speeds["static packing"] < speeds["Alg. 1"] < speeds["+ balance"] < speeds["+ remote loader"]
    assert speeds["+ remote loader"] < speeds["ours, ring"] <= speeds["ours"] <= best


def test_only_a_remote_loader_hides_loading():
    replayed = replay(SETTING, "byted", LONGEST_CONTEXT, 2)
    local, remote = replayed["+ balance"], replayed["+ remote loader"]
    assert local.loading / local.tokens == pytest.approx(1 / 4e6)
    assert remote.loading == 0
    assert local.busy_seconds == pytest.approx(remote.busy_seconds)
    assert replayed["ours"].loading == 0 < replayed["static packing"].loading


def test_the_static_degree_is_the_contexts():
    topology = Topology(96, 1000)
    assert context_degree(1, topology) == 1
    assert context_degree(5000, topology) == 6
    assert context_degree(96_000, topology) == 96
    with pytest.raises(ValueError, match=r"97000 tokens exceeds 96 ranks x 1000 .* >= 97 ranks, or a capacity >= 1011"):
        context_degree(97_000, topology)
    plan = plan_static_cp(np.array([10, 20]), topology, SETTING.cost, context=5000)
    plan.check(np.array([10, 20]))
    assert plan.members.tolist() == [6]
