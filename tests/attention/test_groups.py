"""Process groups end with what they were made for, and not before: on no rank while another one still uses them."""

import gc

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from hf_longctx.attention.exchange import Exchange
from hf_longctx.checkpoint.rank_messages import Ranks
from tests.worlds.rank_pool import RankPool

TIMES = 5
GROUPS_OF_AN_EXCHANGE = 2


def passed_on(exchange: Exchange) -> float:
    """Return what the rank before this one has sent."""
    own, arrived = torch.full((3,), float(exchange.rank)), torch.empty(3)
    after, before = (exchange.rank + 1) % exchange.world_size, (exchange.rank - 1) % exchange.world_size
    exchange.start([(own, after)], [(arrived, before)]).wait()
    return float(arrived[0])


def forgotten() -> list[int]:
    """torch's groups after each of several exchanges, of which none is kept, and of several Ranks after them."""
    counts = []
    for _ in range(TIMES):
        assert passed_on(Exchange(30.0)) == (dist.get_rank() - 1) % dist.get_world_size()
        counts.append(len(_world.pg_map))
    for _ in range(TIMES):
        assert Ranks(30.0).gathered(dist.get_rank()) == list(range(dist.get_world_size()))
        counts.append(len(_world.pg_map))
    return counts


def test_groups_of_forgotten_exchanges_are_freed_when_the_next_is_made(ranks2: RankPool):
    for counts in ranks2.run(forgotten):
        assert max(counts[1:]) <= counts[0] + 1, counts  # and not one more each time


def kept_by_rank_1() -> tuple[int, int, float]:
    """Groups before and after ranks 0 and 1 have forgotten an exchange at different times, and what it passed on meanwhile."""
    exchange = Exchange(30.0, ranks_per_node=1)
    groups = [*exchange._communicators.groups.values()]
    if dist.get_rank() == 0:
        cycle: list[object] = [exchange]
        cycle.append(cycle)  # only the garbage collector finds that it is forgotten
        del exchange, cycle
        gc.collect()
    Exchange(30.0)
    still = sum(group in _world.pg_map for group in groups)
    arrived = -1.0
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 0, group=groups[0])
        del exchange
    else:
        received = torch.zeros(1)
        dist.recv(received, 1, group=groups[0])
        arrived = float(received)
    Exchange(30.0)
    return still, sum(group in _world.pg_map for group in groups), arrived


def test_a_group_that_one_rank_still_uses_is_freed_on_none(ranks2: RankPool):
    (still, at_last, arrived), (still_of_1, at_last_of_1, _) = ranks2.run(kept_by_rank_1)
    assert (still, still_of_1) == (GROUPS_OF_AN_EXCHANGE, GROUPS_OF_AN_EXCHANGE)
    assert (at_last, at_last_of_1) == (0, 0)
    assert arrived == 1.0
