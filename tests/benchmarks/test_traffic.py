"""The counter of bytes that benchmarks compare peers by."""

import sys
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _count_traffic() -> list[int]:
    """Bytes counted for one operation of each kind, of 40 float32 values on every rank."""
    import torch.distributed as dist

    sys.path.insert(0, str(BENCHMARKS))
    from traffic import Traffic

    sys.path.remove(str(BENCHMARKS))
    x, n, group = torch.ones(40), dist.get_world_size(), dist.group.WORLD
    right, left = (dist.get_rank() + 1) % n, (dist.get_rank() - 1) % n

    def point_to_point() -> None:
        send, receive = dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, torch.empty(40), left)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    counts = []
    with Traffic() as traffic:
        for operation in (
            point_to_point,
            lambda: dist.all_to_all_single(torch.empty(40), x),
            lambda: dist.all_gather_into_tensor(torch.empty(40 * n), x, group),
            lambda: dist.reduce_scatter_tensor(torch.empty(40 // n), x, group=group),
        ):
            before = traffic.sent
            operation()
            counts.append(traffic.sent - before)
    point_to_point()
    return [*counts, traffic.sent - sum(counts)]


def test_traffic_counts_what_leaves_a_rank_while_it_is_open(ranks4):
    assert ranks4.run(_count_traffic) == [[160, 120, 480, 120, 0]] * 4


def _count_ours() -> list[tuple[int, int]]:
    """For each mode: bytes that benchmarks count, and bytes that the exchange says that it sent."""
    sys.path.insert(0, str(BENCHMARKS))
    import torch.distributed as dist
    from attention_cases import Case
    from attention_peers import World
    from attention_peers.ours import IMPLEMENTATIONS
    from traffic import Traffic

    sys.path.remove(str(BENCHMARKS))
    from hf_longctx.attention.exchange import Exchange

    world, counts = World(dist.get_rank(), dist.get_world_size(), Exchange()), []
    case = Case("one document", (4096,), heads=4, kv_heads=2, head_dim=8)  # long enough for all ranks to share it
    for prepare in IMPLEMENTATIONS.values():
        prepared, before = prepare(case, world), world.exchange.bytes_sent
        q, k, v, _ = (prepared.shard(x) for x in case.inputs())
        with Traffic() as traffic:
            prepared.attend(q.requires_grad_(), k, v).sum().backward()
        counts.append((traffic.sent, world.exchange.bytes_sent - before))
    return counts


def test_ours_is_counted_like_every_peer_in_each_mode(ranks4):
    for counts in ranks4.run(_count_ours):
        assert len(counts) == 3
        for counted, expected in counts:
            assert counted == expected > 0
