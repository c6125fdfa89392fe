"""No order in which NCCL may run the messages of a step ends in a deadlock (replay.py); faults that would are found.

`python benchmarks/replay.py --check message-order` plays up to 256 ranks.
"""

import pytest

from hf_longctx.attention.communicators import BETWEEN, BETWEEN_GRADIENTS, INSIDE
from tests.replay import EXPERTS, HEADS_SHARED, SHARDS, Batch, Case, match, recorded, stuck

CASES = {
    "nodes of 4": Case(16, ranks_per_node=4),
    "ulysses": Case(16, ranks_per_node=4, ulysses=4),
    "window, last slice kept": Case(12, ranks_per_node=4, window=96, keep_last_slice=True),
    "in rounds": Case(16, ranks_per_node=4, in_rounds=True),
    "heads shared": Case(8, ranks_per_node=2, tensor_parallel=4),
    "experts": Case(8, ranks_per_node=4, in_rounds=True, experts=True, tensor_parallel=2),
}


@pytest.mark.parametrize("name", CASES)
def test_all_messages_arrive_whatever_waits_for_what(name: str):
    by_rank = recorded(CASES[name])
    assert match(by_rank) == 0, "each message has another end of its size"
    lanes = {batch.lane for batches in by_rank for batch in batches}
    case = CASES[name]
    further = {SHARDS: case.in_rounds, HEADS_SHARED: case.tensor_parallel > 1, EXPERTS: case.experts}
    assert lanes == {INSIDE, BETWEEN, BETWEEN_GRADIENTS} | {lane for lane, used in further.items() if used}
    assert len(by_rank) == case.ranks * case.tensor_parallel
    assert min(map(len, by_rank)) > 0
    assert not stuck(by_rank, one_at_a_time=False)
    assert not stuck(by_rank, one_at_a_time=True)


def swapped(batches: list[Batch], first: str, second: str) -> int:
    """Put each batch on the first group behind the one on the second that follows it. Returns how many there were."""
    count = at = 0
    while at + 1 < len(batches):
        if (batches[at].lane, batches[at + 1].lane) == (first, second):
            batches[at], batches[at + 1] = batches[at + 1], batches[at]
            count, at = count + 1, at + 1
        at += 1
    return count


def test_a_rank_that_starts_messages_between_nodes_first_is_found():
    by_rank = recorded(Case(8, ranks_per_node=2))
    assert swapped(by_rank[2], INSIDE, BETWEEN) > 0
    assert match(by_rank) == 0
    assert not stuck(by_rank, one_at_a_time=False), "groups of their own do not wait for each other"
    assert stuck(by_rank, one_at_a_time=True)


def test_a_collective_at_another_place_is_found():
    by_rank = recorded(Case(8, ranks_per_node=4, in_rounds=True))
    places = [at for at, batch in enumerate(by_rank[0]) if batch.lane == SHARDS]
    first = next(at for at in places if at + 1 not in places and at + 1 < len(by_rank[0]))
    by_rank[0][first], by_rank[0][first + 1] = by_rank[0][first + 1], by_rank[0][first]
    assert match(by_rank) == 0
    assert stuck(by_rank, one_at_a_time=True)


def test_processes_that_sum_before_they_have_exchanged_are_found():
    """0 sums with 1, which exchanges with 3, which sums with 2, which exchanges with 0."""
    by_rank = recorded(Case(2, ranks_per_node=2, tensor_parallel=2))
    for process in (0, 3):
        assert swapped(by_rank[process], INSIDE, HEADS_SHARED) > 0
    assert match(by_rank) == 0
    assert stuck(by_rank, one_at_a_time=True)


def test_a_message_without_another_end_and_one_of_another_size_are_counted():
    one, other = Batch(0, INSIDE, [(1, 8), (1, 4)], []), Batch(1, INSIDE, [], [(0, 16)])
    assert match([[one], [other]]) == 2
