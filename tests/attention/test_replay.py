"""No order in which NCCL may run the messages of a step ends in a deadlock (tests/worlds/replay.py); faults that would are found.

`python benchmarks/replay.py --check message-order` plays up to 512 ranks.
"""

import pytest

from hf_longctx.attention.communicators import BETWEEN, BETWEEN_GRADIENTS, INSIDE
from hf_longctx.settings.gpu_environment import OVERLAPPING_DRIVER, kernels_one_at_a_time
from tests.worlds.replay import EXPERTS, HEADS_SHARED, RULES, SHARDS, Batch, Case, Rule, match, recorded, stuck
from tests.worlds.replay_stages import EVERYONE, record

CASES = {
    "nodes of 4": Case(16, ranks_per_node=4),
    "ulysses": Case(16, ranks_per_node=4, ulysses=4),
    "window, last slice kept": Case(12, ranks_per_node=4, window=96, keep_last_slice=True),
    "in rounds": Case(16, ranks_per_node=4, in_rounds=True),
    "heads shared": Case(8, ranks_per_node=2, tensor_parallel=4),
    "experts": Case(8, ranks_per_node=4, in_rounds=True, experts=True, tensor_parallel=2),
    "stages": Case(4, ranks_per_node=2, stages=2),
    "stages in order": Case(2, ranks_per_node=1, stages=4, links_in_order=True),
    "interleaved": Case(4, ranks_per_node=2, stages=2, virtual=2, tensor_parallel=2, links_in_order=True),
}


def rules_of(case: Case) -> tuple[Rule, ...]:
    """Receives that are posted early take it for granted that a device runs several kernels."""
    return RULES if case.stages == 1 or case.links_in_order else RULES[:2]


@pytest.mark.parametrize("name", CASES)
def test_all_messages_arrive_whatever_waits_for_what(name: str):
    case = CASES[name]
    by_rank = record(case)
    assert match(by_rank) == 0, "each message has another end of its size"
    lanes = {batch.lane for batches in by_rank for batch in batches if not batch.beside and not batch.waits_for}
    staged = case.stages > 1
    further = {SHARDS: case.in_rounds or staged, HEADS_SHARED: case.tensor_parallel > 1, EXPERTS: case.experts}
    further |= {EVERYONE: staged, INSIDE: case.ranks_per_node > 1}
    assert lanes == {BETWEEN, BETWEEN_GRADIENTS} | {lane for lane, used in further.items() if used}
    ways = {batch.lane for batches in by_rank for batch in batches if batch.beside}
    assert len(ways) == 2 * (case.stages - 1 + (case.virtual > 1)), "of each edge, there and back"
    assert len(by_rank) == case.ranks * case.tensor_parallel * case.stages
    assert min(map(len, by_rank)) > 0
    for rule in rules_of(case):
        assert not stuck(by_rank, rule), rule


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
    assert not stuck(by_rank, "in order"), "groups of their own do not wait for each other"
    assert stuck(by_rank, "one at a time")


def test_a_collective_at_another_place_is_found():
    by_rank = recorded(Case(8, ranks_per_node=4, in_rounds=True))
    places = [at for at, batch in enumerate(by_rank[0]) if batch.lane == SHARDS]
    first = next(at for at in places if at + 1 not in places and at + 1 < len(by_rank[0]))
    by_rank[0][first], by_rank[0][first + 1] = by_rank[0][first + 1], by_rank[0][first]
    assert match(by_rank) == 0
    assert stuck(by_rank, "one at a time")


def test_processes_that_sum_before_they_have_exchanged_are_found():
    """0 sums with 1, which exchanges with 3, which sums with 2, which exchanges with 0."""
    by_rank = recorded(Case(2, ranks_per_node=2, tensor_parallel=2))
    for process in (0, 3):
        assert swapped(by_rank[process], INSIDE, HEADS_SHARED) > 0
    assert match(by_rank) == 0
    assert stuck(by_rank, "one at a time")


def test_early_receives_of_stages_are_found_where_a_device_runs_one_kernel():
    """0 waits for gradients that follow from activations which it has yet to send."""
    by_rank = record(CASES["stages"])
    assert match(by_rank) == 0
    assert stuck(by_rank, "one at a time")


def test_a_stage_that_starts_messages_between_nodes_first_is_found():
    by_rank = record(Case(8, ranks_per_node=2, stages=2, links_in_order=True))
    assert swapped(by_rank[10], INSIDE, BETWEEN) > 0
    assert match(by_rank) == 0
    assert stuck(by_rank, "host blocks")
    assert stuck(by_rank, "one at a time")


@pytest.mark.parametrize(
    ("variables", "driver", "expected"),
    [
        ({}, 12000, False),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, OVERLAPPING_DRIVER, False),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, OVERLAPPING_DRIVER - 1, True),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, 12000, False),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 13000, True),
    ],
)
def test_devices_that_run_one_kernel_are_known(variables: dict[str, str], driver: int, expected: bool):
    assert kernels_one_at_a_time(variables, driver) == expected


def test_a_message_without_another_end_and_one_of_another_size_are_counted():
    one, other = Batch(0, INSIDE, [(1, 8), (1, 4)], []), Batch(1, INSIDE, [], [(0, 16)])
    assert match([[one], [other]]) == 2
