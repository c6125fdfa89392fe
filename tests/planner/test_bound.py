"""Lower bounds against brute force: every choice of ranks for every document, on two and three ranks, in every mode."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, Topology, lower_bound, plan_step
from hf_longctx.planner.bound import best_sizes, best_times
from hf_longctx.planner.placing.rank_shares import proportional_shares
from hf_longctx.planner.plan import MODES
from hf_longctx.planner.stages.causal_chunks import MOST_CHUNKS
from tests.builders.plans.random_plans import CPU_COST, GPU_COST, costs, lengths_for, steps, topologies

many_examples = settings(max_examples=4 * settings().max_examples)
"""Of a profile: an example takes milliseconds here."""


@st.composite
def tiny_steps(draw: st.DrawFn) -> tuple[np.ndarray, Topology, CostModel]:
    """(lengths, longest first, topology, cost): up to 5 documents on 2 ranks, up to 4 on 3."""
    topology = draw(topologies(max_ranks=3))
    lengths = draw(lengths_for(topology, 7 - max(topology.world_size, 2)))
    return np.sort(lengths)[::-1], topology, draw(costs())


def ways(length: int, topology: Topology, cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """int64 [groups of ranks that hold the document, world_size] each: time on each rank without that of micro-batches, and
    tokens on it."""
    times, tokens = [], []
    ranks = range(topology.world_size)
    for size in range(1, topology.world_size + 1):
        for group in itertools.combinations(ranks, size):
            members = np.array(group)
            speeds, room = topology.speeds[members], topology.capacities[members]
            if size > length or length > room.sum():
                continue
            shares = proportional_shares(length, speeds, room)
            work = cost.work(length, size)
            # Equal ranks differ by a token at most, which the cost model ignores.
            slowest = -(-work // size) if topology.uniform else max(-(-work * shares * 1000 // (length * speeds)))
            times.append(np.zeros(topology.world_size, np.int64))
            tokens.append(np.zeros(topology.world_size, np.int64))
            times[-1][members], tokens[-1][members] = slowest, shares
    return np.array(times), np.array(tokens)


def all_plans(lengths: np.ndarray, topology: Topology, cost: CostModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [plans, world_size] each: time on each rank without that of micro-batches, its longest document, its tokens."""
    time = longest = tokens = np.zeros((1, topology.world_size), np.int64)
    for length in lengths.tolist():
        times, shares = ways(length, topology, cost)
        time = (time[:, None] + times).reshape(-1, topology.world_size)
        longest = np.maximum(longest[:, None], times).reshape(-1, topology.world_size)
        tokens = (tokens[:, None] + shares).reshape(-1, topology.world_size)
    return time, longest, tokens


def waits_of_stages(longest: np.ndarray, topology: Topology, cost: CostModel) -> np.ndarray:
    """int64, shape of `longest`, the time of each rank's longest document, 0 without any: what stages wait for it in the best
    number of chunks, with the launches of these."""
    times, which = np.unique(longest, return_inverse=True)
    chunks = np.arange(1, MOST_CHUNKS + 1 if topology.uniform else 2)[:, None]
    more = (chunks - 1) * (cost.document_ns + cost.micro_batch_ns)
    micro_batch = cost.micro_batch_ns * 1000 // int(topology.speeds.max())
    waits = (more + (topology.stages - 1) * (times + micro_batch + more) // chunks).min(axis=0)
    return np.where(times > 0, waits, 0)[which].reshape(longest.shape)


def best_makespan(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: str) -> int:
    """Return the makespan of the best of all plans, were no rank ever to wait for another and all micro-batches full but the last
    of each rank."""
    micro_batch = -(-cost.micro_batch_ns * 1000 // topology.speeds)
    if mode != "lockstep":
        time, longest, tokens = all_plans(lengths, topology, cost)
        busy = time + -(-tokens // topology.capacities) * micro_batch
        if mode == "pipeline":
            busy = busy + waits_of_stages(longest, topology, cost)
        return int(busy.max(axis=1).min())
    round_time: dict[int, int] = {}  # of the documents in a set of bits, in one round
    for documents in range(1, 2 ** len(lengths)):
        time, _, tokens = all_plans(lengths[[i for i in range(len(lengths)) if documents >> i & 1]], topology, cost)
        fits = (tokens <= topology.capacities).all(axis=1)
        if fits.any():
            round_time[documents] = int((time + (tokens > 0) * micro_batch)[fits].max(axis=1).min())
    best = {0: 0}
    for documents in range(1, 2 ** len(lengths)):
        rounds = [d for d in round_time if d & documents == d]
        best[documents] = min(round_time[d] + best[documents - d] for d in rounds)
    return best[2 ** len(lengths) - 1]


@pytest.mark.parametrize("mode", MODES)
@many_examples
@given(tiny_steps())
@example((np.array([1]), Topology(3, 1, speed=(1600, 250, 250)), GPU_COST))
@example((np.array([6, 6, 6, 1]), Topology(3, 2, stages=2), GPU_COST))
def test_no_plan_of_all_beats_the_bound(mode, step):
    lengths, topology, cost = step
    assert 1 <= lower_bound(lengths, topology, cost, mode) <= best_makespan(lengths, topology, cost, mode)


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_two_ranks_come_close_to_the_best_of_all_plans(lengths):
    """On two ranks, documents on both go first and nobody waits, so the best of all is exact."""
    topology = Topology(2, 2000)
    makespan = plan_step(np.array(lengths), topology, CPU_COST).timeline().makespan
    best = best_makespan(np.array(lengths), topology, CPU_COST, "async")
    assert best <= makespan <= 1.2 * best


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(st.integers(100, 2000), min_size=1, max_size=4))
def test_three_ranks_of_two_generations_come_close_to_the_best_of_all_plans(lengths):
    """Here the best of all may be out of reach, because ranks do wait."""
    topology = Topology(3, 2000, speed=(1000, 1000, 500))
    makespan = plan_step(np.array(lengths), topology, CPU_COST).timeline().makespan
    best = best_makespan(np.array(lengths), topology, CPU_COST, "async")
    assert best - len(lengths) <= makespan <= 1.4 * best  # whole documents are rounded up one by one here


@pytest.mark.parametrize("mode", MODES)
@many_examples
@given(steps(equal=True), st.integers(1, 5))
def test_more_ranks_never_raise_the_bound(mode, step, more):
    lengths, topology, cost = step
    ordered = np.sort(lengths)[::-1]
    larger = Topology(topology.world_size + more, topology.capacity, stages=topology.stages)
    assert lower_bound(ordered, larger, cost, mode) <= lower_bound(ordered, topology, cost, mode)


@pytest.mark.parametrize("mode", ["async", "pipeline"])
@many_examples
@given(steps(), st.data())
def test_more_or_longer_documents_never_lower_the_bound(mode, step, data):
    """But for a nanosecond of work: the work of a document is rounded up once, on however many ranks it is."""
    lengths, topology, cost = step
    nanosecond = -(-1000 // min(topology.speed or (1000,)))
    bound = lower_bound(np.sort(lengths)[::-1], topology, cost, mode)
    more = np.append(lengths, data.draw(lengths_for(topology, 3)))
    longer = np.minimum(lengths + data.draw(st.integers(1, 5)), topology.tokens)
    for harder in (more, longer):
        assert lower_bound(np.sort(harder)[::-1], topology, cost, mode) >= bound - nanosecond


@many_examples
@given(costs(), st.integers(1, 10**5), st.integers(1, 300), st.integers(1, 20))
def test_the_best_group_size_is_the_best_of_all_sizes(cost, length, world_size, fewest):
    """Bisection finds what trying every size finds, but for a nanosecond of rounding."""
    fewest = min(fewest, world_size, length)
    sizes = np.arange(fewest, min(world_size, length) + 1)
    best = best_sizes(np.array([length]), np.array([fewest]), world_size, cost.coefficients)
    assert fewest <= best[0] <= sizes[-1]
    assert cost.time(length, int(best[0])) <= cost.time(length, sizes).min() + 1


@many_examples
@given(steps())
def test_best_times_are_those_of_no_group_of_any_ranks(step):
    # Of unequal ranks, the fastest are taken for those that have room, so no group can be faster.
    lengths, topology, cost = step
    lengths = np.unique(lengths)
    times = best_times(lengths, topology.fewest_ranks(lengths), topology, cost)
    for length, time in zip(lengths.tolist(), times.tolist()):
        fewest = int(topology.fewest_ranks(np.array([length]))[0])
        sizes = np.arange(fewest, min(topology.world_size, length) + 1)
        ends = cost.work(length, sizes) * 1000 / topology.summed_speed(sizes)
        exact = ends.min() + cost.micro_batch_ns * 1000 / topology.speeds.max()
        assert time == pytest.approx(exact, rel=1e-9, abs=2)


def test_bounds_by_hand():
    """Work of 6, 3 and 1 tokens: 36 + 6, 9 + 3 and 1 + 1 ns on one rank; on more, 7 ns for each pair of ranks and layer."""
    cost = CostModel(attention_ps=1000, linear_ps=1000, inside_ps=0, message_ns=1, micro_batch_ns=4)
    lengths = np.array([6, 3, 1])
    # 10 tokens are at least 2 micro-batches of 4 ns on one rank, and one on each of two. On 2 ranks the longest takes 21 + 4.
    assert lower_bound(lengths, Topology(1, 6), cost) == 42 + 12 + 2 + 2 * 4
    assert lower_bound(lengths, Topology(2, 6), cost) == (42 + 12 + 2 + 2 * 4) // 2
    assert lower_bound(lengths, Topology(4, 6), cost) == (42 + 12 + 2) // 4 + 4
    assert lower_bound(lengths, Topology(2, 6, speed=(1000, 500)), cost) == (42 + 12 + 2 + 2 * 4) * 1000 // 1500
    # In k chunks, (11 + 4 + 4*(k - 1)) * (1 + 2/k) ns: least at k = 2, as 19 * 2.
    assert lower_bound(lengths, Topology(4, 6, stages=3), cost, "pipeline") == 38
    assert (
        lower_bound(lengths, Topology(4, 6, stages=3, speed=(1000, 999, 999, 999)), cost, "pipeline") > 38
    )  # no chunks
    # Rounds of 6 tokens on one rank: the longest, then the others.
    assert lower_bound(lengths, Topology(1, 6), cost, "lockstep") >= 42 + 4 + 12 + 4


@pytest.mark.parametrize(
    ("documents", "ranks", "whole"),
    [(3, 1, 1), (5, 5, 1), (33, 8, 2), (33, 4, 3), (32, 4, 2)],  # four of these documents fill a rank
)
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_micro_batches_are_counted_whole(documents: int, ranks: int, whole: int, mode: str) -> None:
    cost = CostModel(attention_ps=1, linear_ps=1000, inside_ps=0, micro_batch_ns=50_000)
    lengths = np.full(documents, 1000)
    least = documents * 1000 // ranks + whole * 50_000
    assert lower_bound(lengths, Topology(ranks, 4000), cost, mode) >= least - 1
    plan = plan_step(lengths, Topology(ranks, 4000), cost, mode)
    assert plan.timeline().makespan <= 1.1 * plan.lower_bound


def test_dense_tokens_may_fill_fewer_micro_batches_than_others() -> None:
    """One rank has the dense document alone, in one micro-batch, and the other two for the others: three would be too many."""
    cost = CostModel(attention_ps=1000, linear_ps=1, inside_ps=0, micro_batch_ns=10_000_000)
    lengths = np.array([4000, *[100] * 41])
    bound = lower_bound(lengths, Topology(2, 4000), cost)
    assert bound <= plan_step(lengths, Topology(2, 4000), cost).timeline().makespan < 2.1 * 10_000_000 + 16_000_000
