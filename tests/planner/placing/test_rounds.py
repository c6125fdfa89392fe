"""One round of lockstep: what it holds keeps its height and capacity, whoever asks; and what becomes of the last rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, Topology, compiled, lower_bound, plan_step
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.group_times import group_time, placement_context
from hf_longctx.planner.placing.rounds import builder, lockstep
from hf_longctx.planner.placing.rounds.dealer import Dealer
from hf_longctx.planner.placing.rounds.filling import fill_best_round, lowest_that_holds_all
from hf_longctx.planner.placing.rounds.gaps import give_all_back, nothing_taken, take
from hf_longctx.planner.placing.rounds.lockstep import WINDOWS
from hf_longctx.planner.placing.rounds.waiting_documents import close_up, waiting_from
from hf_longctx.simulator.lengths import draw
from tests.builders.plans.waiting_documents import COST, documents_of


def filled(documents, context, heights, windows=()) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """When the best round ends, and what it holds."""
    count = len(documents.lengths)
    kept = np.zeros(count, np.bool_), np.full(count, -1), np.full(count, -1)
    end, number = fill_best_round(np.array(heights), np.array(windows, np.int64), 4, documents, context, kept)
    assert number == kept[0].sum()
    return int(end), *kept


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_the_best_of_many_heights_is_the_best_of_each_alone(seed, unequal):
    """Those that are given up halfway are none better."""
    rng = np.random.default_rng(seed)
    ranks, documents = rng.integers(1, 41), rng.integers(1, 61)
    speed = tuple(300 + 97 * rank % 701 for rank in range(ranks)) if unequal else None
    topology = Topology(ranks, 8192, rng.choice([1, 3, 8]), speed=speed)
    lengths = np.minimum(rng.integers(1, 60_001, documents), topology.tokens)
    with planning(0):
        documents, context = documents_of(lengths, topology)
        longest = int(documents.lengths[0])
        high = int(group_time(longest, 0, int(np.searchsorted(context.before, longest)), context))
        heights = [high * thousandths // 1000 for thousandths in range(400, 2001, 100)]
        rates = []
        for height in heights:
            end, placed, *_ = filled(documents, context, [height])
            rates.append(np.array(documents.shared)[placed].sum() / max(end, 1))
        end, placed, *_ = filled(documents, context, heights)
    work = np.array(documents.shared)[placed].sum()
    assert work >= max(rates) * end * (1 - 1e-9), "lowered, it ends no later and does no less"


@pytest.mark.parametrize("seed", range(10))
def test_the_lowest_round_of_all_documents_is_found_by_bisection(seed):
    """Heights that cannot hold all of them are given up halfway, and no others."""
    rng = np.random.default_rng(seed)
    topology = Topology(rng.integers(2, 41), 8192, rng.choice([1, 3, 8]))
    lengths = np.exp(rng.uniform(0, 10, 200)).astype(np.int64)
    lengths = lengths[np.cumsum(lengths) * 3 < topology.tokens * 2]
    with planning(0):
        documents, context = documents_of(lengths, topology)
        low, high = int(documents.alone[0]) // 8, int(np.sum(documents.alone)) + COST.micro_batch_ns
        lowest, end = lowest_that_holds_all(low, high, documents, context)
        while high - low > low // 1000 + 1:
            middle = (low + high) // 2
            placed = filled(documents, context, [middle])[1]
            low, high = (low, middle) if placed.all() else (middle, high)
    assert lowest == high
    assert end == filled(documents, context, [high])[0]


@given(data=st.data(), lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=40))
def test_documents_that_a_round_leaves_wait_as_if_they_had_been_alone(data, lengths):
    documents, _ = documents_of(np.array(lengths), Topology(8, 8192))
    undone, begin = np.arange(len(lengths)), 0
    left = undone.copy()
    with planning(0):
        while begin < len(undone):
            end = data.draw(st.integers(begin + 1, len(undone)))
            placed = np.zeros(len(undone), np.bool_)
            placed[begin:end] = data.draw(st.lists(st.booleans(), min_size=end - begin, max_size=end - begin))
            placed[end - 1] = True
            left = np.setdiff1d(left, undone[placed])
            begin = close_up(begin, end, placed, undone, documents)
            assert not placed.any()
            assert undone[begin:].tolist() == left.tolist()
            rest, (alone, _) = (
                waiting_from(begin, documents),
                documents_of(np.sort(lengths)[::-1][left], Topology(8, 8192)),
            )
            for name, column, expected in zip(alone._fields, rest, alone):
                if name.endswith("_before"):
                    column, expected = np.diff(column), np.diff(expected)
                assert list(column) == list(expected), name


@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=60),
    ranks=st.integers(1, 40),
    node=st.sampled_from([None, 1, 3, 8]),
    windows=st.sampled_from([(), WINDOWS]),
    unequal=st.booleans(),
    share=st.floats(0, 1),
)
def test_a_round_keeps_its_height_its_nodes_and_what_ranks_hold(lengths, ranks, node, windows, unequal, share):
    speed = tuple(500 + 37 * rank % 500 for rank in range(ranks)) if unequal else None
    topology = Topology(ranks, 8192, node, speed=speed)
    lengths = np.minimum(np.array(lengths), topology.tokens)
    documents, context = documents_of(lengths, topology)
    low = int(COST.time(int(documents.lengths[0]), int(documents.best[0]))) + COST.micro_batch_ns
    height = int(low * (1 + 20 * share))
    with planning(0):
        end, placed, first, size = filled(documents, context, [low, height], windows)
        if not placed[0]:
            assert end == 0
            assert not placed.any()
            return
        assert 0 < end <= height + 1
        tokens, busy, owner = np.zeros(ranks), np.zeros(ranks), np.full(ranks, -1)
        for i in np.flatnonzero(placed):
            members = slice(first[i], first[i] + size[i])
            assert first[i] + size[i] <= ranks
            if size[i] > 1:
                assert (owner[members] == -1).all()  # alone in its micro-batch
                assert documents.lengths[i] <= topology.capacities[members].sum()
                assert group_time(documents.lengths[i], first[i], size[i], context) <= height
                owner[members] = i
                if not unequal and size[i] <= topology.node_size:
                    assert first[i] // topology.node_size == (first[i] + size[i] - 1) // topology.node_size
            else:
                assert owner[first[i]] in (-1, -2)
                owner[first[i]] = -2
                tokens[first[i]] += documents.lengths[i]
                busy[first[i]] += documents.alone[i] * 1000 / topology.speeds[first[i]]
        assert (tokens <= topology.capacity).all()
        assert (busy <= height + 2).all()


@pytest.mark.parametrize(
    ("lengths", "ranks", "memory"),
    [
        ([600, 230], 16, (1000,) * 8 + (300,) * 8),
        ([500, 400], 16, None),
        ([600, 230, 230, 90], 13, (1000,) * 8 + (300,) * 5),
    ],
)
def test_groups_after_one_that_ends_inside_a_node(lengths, ranks, memory):
    """Messages so slow that a group is not rounded up to whole nodes; what lies after it was meant for other ranks."""
    cost = CostModel(attention_ps=0, linear_ps=1, inside_ps=0, message_ns=10**6)
    for mode in ("async", "lockstep"):
        plan = plan_step(np.array(lengths), Topology(ranks, 100, 4, memory=memory), cost, mode)
        plan.check(np.array(lengths))
        for i in np.flatnonzero((plan.members <= 4) & (mode == "lockstep")):
            members = plan.rank[plan.first_member[i] : plan.first_member[i + 1]]
            assert members[0] // 4 == members[-1] // 4


@pytest.mark.parametrize(("ranks", "node", "count"), [(7, None, 3), (7, 4, 3), (16, 4, 8), (15, 8, 7), (12, 1, 12)])
def test_a_round_of_many_documents_takes_all_ranks_that_it_can(ranks, node, count):
    """Each on two ranks, or on one where a node has no more."""
    length = 100 if node == 1 else 150
    documents, context = documents_of(np.full(40, length), Topology(ranks, 100, node))
    height = int(COST.time(length, -(-length // 100))) + COST.micro_batch_ns
    assert filled(documents, context, [height])[1].sum() == count


def test_windows_hold_documents_of_several_sizes_that_end_together():
    """Groups of 8, 5 and 3 of a node's ranks beside each other, instead of one size and documents that differ more."""
    topology = Topology(64, 16384, 8)
    documents, context = documents_of(draw("agent_trajectories", 2000, 0), topology)
    low, high = (int(COST.time(int(documents.lengths[0]), n)) for n in (64, 9))
    heights = np.geomspace(low, high, 33).astype(np.int64)
    ends = {}
    for windows in ((), WINDOWS):
        end, placed, _, size = filled(documents, context, heights, windows)
        ends[bool(windows)] = documents.shared[placed].sum() / (64 * end), len(set(size[placed]))
    assert ends[True][0] > ends[False][0]


def test_windows_keep_slow_ranks_for_documents_that_suit_them():
    """Each document takes a node of four. At the height of the longest on fast nodes, a slow one takes two nodes for a document
    like it, or one for a shorter one. There are more of these than a round may have runs."""
    topology = Topology(800, 2324, 4, speed=(1000,) * 400 + (780,) * 400)
    documents, context = documents_of(np.linspace(5000, 9296, 3000).astype(np.int64), topology)
    height = group_time(int(documents.lengths[0]), 0, 4, context)
    fast, slow = slice(0, 400), slice(400, 800)
    busy = {}
    for windows in ((), WINDOWS):
        end, placed, first, size = filled(documents, context, [int(height)], windows)
        work = np.zeros(800)
        for i in np.flatnonzero(placed):
            work[first[i] : first[i] + size[i]] = group_time(documents.lengths[i], first[i], size[i], context) / end
        busy[bool(windows)] = work[fast].mean(), work[slow].mean(), placed.sum()
    assert min(busy[True][:2]) > 0.95
    assert busy[True][2] == 200, "one to a node"
    assert busy[False][2] < 200


def test_all_are_held_at_the_lowest_height_that_is_enough():
    topology = Topology(16, 4096, 8)
    documents, context = documents_of(np.array([9000, 4000, 3000, 800, 700, 500, 20]), topology)
    height, end = lowest_that_holds_all(1, 10**13, documents, context)
    assert 0 < end <= height
    assert filled(documents, context, [height])[1].all()
    assert not filled(documents, context, [height * 998 // 1000])[1].all()
    assert lowest_that_holds_all(1, height // 2, documents, context) == (0, 0)


@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 30), st.integers(1, 9))
def test_ranks_are_taken_once_and_inside_a_node(asked, ranks, node):
    context = placement_context(Topology(ranks, 8, node), COST)
    node = context.node
    with planning(0):
        free = nothing_taken.interpreted(context)
        for _ in range(2):
            give_all_back.interpreted(free)
            taken = np.zeros(ranks, bool)
            for width in (1 + wish % node for wish in asked):
                start = take.interpreted(width, -1, free, context)
                inside = [at for at in range(ranks - width + 1) if at // node == (at + width - 1) // node]
                if start < 0:
                    assert all(taken[at : at + width].any() for at in inside)
                    continue
                assert start in inside
                assert not taken[start : start + width].any()
                taken[start : start + width] = True


@pytest.mark.parametrize(("documents", "ceiling"), [([100] * 16 + [60] * 8, 1.01), ([3000] * 9, 1.35)])
def test_the_last_rounds_are_put_together(documents, ceiling):
    # What fits into one round is no second one with most ranks idle.
    topology = Topology(8, 8192)
    cost = CostModel(attention_ps=0, linear_ps=10**6, inside_ps=0, message_ns=10**4)
    plan = plan_step(np.array(documents), topology, cost, "lockstep")
    plan.check(np.array(documents))
    assert plan.timeline().makespan <= ceiling * plan.lower_bound


def test_replacing_the_last_rounds_gains_and_never_loses(monkeypatch):
    """Rounds that do most work per time may leave too little for full ones. Dealing, which makes up for it too, is off."""
    monkeypatch.setattr(Dealer, "estimates", lambda *_: iter(()))
    rng = np.random.default_rng(0)
    steps = [np.clip(rng.lognormal(8, 1.2, rng.integers(6, 40)), 1, 60_000).astype(np.int64) for _ in range(12)]
    topology = Topology(11, 8192, 8, speed=(1000,) * 8 + (800,) * 3)
    makespans = []
    for last in (0, builder.LAST):
        monkeypatch.setattr(builder, "LAST", last)
        plans = [plan_step(lengths, topology, COST, "lockstep") for lengths in steps]
        makespans.append([plan.timeline().makespan / plan.lower_bound for plan in plans])
    without, replaced = np.array(makespans)
    assert (replaced <= without + 1e-3).all()
    assert replaced.mean() < 0.995 * without.mean()


def test_rounds_are_not_filled_as_if_exchange_were_dearer_where_that_exceeds_64_bits(monkeypatch):
    """Interpreted, whatever was planned before: all of it would be compiled once more, for units of time."""
    monkeypatch.setattr(compiled, "_spent", 0.0)
    monkeypatch.setattr(compiled, "_compiles", False)
    cost = CostModel(attention_ps=10, linear_ps=10**6, inside_ps=10, message_ns=4 * 10**18)
    lengths = np.array([700, 600, 500, 500, 450])
    plan = plan_step(lengths, Topology(2, 1000), cost, "lockstep")
    plan.check(lengths)
    assert plan.timeline().makespan * 1000 > plan.lower_bound * lockstep.WINDOWS_ABOVE


def test_a_document_for_most_unequal_ranks_stays_on_the_fewest_where_whole_nodes_are_too_slow():
    """Nine ranks in an order of nodes of 4: it ends soonest on 6, which would be rounded up to 8, and then ends too late."""
    memory = (250, 250, 1000, 1600, *[250] * 5)
    topology = Topology(9, 40, speed=(250, 250, 1600, 500, 250, 500, 730, 730, 814), memory=memory)
    cost = CostModel(
        linear_ps=185 * 10**6, inside_ps=3 * 10**6, message_ns=16 * 10**6, ranks_per_node=9, attention_ps=4681
    )
    plan = plan_step(np.array([90]), topology, cost, "lockstep")
    plan.check(np.array([90]))


def test_rounds_that_must_end_late_are_given_up():
    lengths = draw("agent_trajectories", 60, 0)
    lengths = np.sort(lengths)[::-1].astype(np.int64)
    topology = Topology(64, 8192, ranks_per_node=8)
    bound = lower_bound(lengths, topology, COST, "lockstep")
    arguments = (lengths, lengths, np.arange(60), bound, topology, COST, placement_context(topology, COST))
    with planning(0):
        first = next(lockstep.plans_in_rounds(*arguments))
        assert list(lockstep.plans_in_rounds(*arguments, soonest=first.timeline().makespan // 2)) == []
        in_time = next(lockstep.plans_in_rounds(*arguments, soonest=first.timeline().makespan))
    assert in_time.digest() == first.digest()
