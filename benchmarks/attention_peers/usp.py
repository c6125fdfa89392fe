"""yunchang (USP): Ulysses inside, a zigzag ring outside."""

from functools import partial

import torch
import torch.distributed as dist
import yunchang
from attention_cases import Case
from yunchang.kernels import AttnType
from yunchang.ulysses import UlyssesAttention

from attention_peers import Prepare, Prepared, World, need, need_groups, need_one_document


def hybrid(case: Case, world: World, ulysses: int) -> Prepared:
    """`ulysses` ranks in inner groups; 1 is a pure ring."""
    need_groups(world, ulysses)
    need(not case.alibi, "its ring asserts that there are no ALiBi slopes")
    need_one_document(case, 2 * world.size)
    ring = world.size // ulysses
    yunchang.set_seq_parallel_pg(ulysses, ring, world.rank, world.size)
    extract = yunchang.EXTRACT_FUNC_DICT["zigzag"]
    attention = yunchang.LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)
    groups = yunchang.globals.PROCESS_GROUP
    shard_groups = groups.RING_PG, groups.ULYSSES_PG

    def shard(x: torch.Tensor) -> torch.Tensor:
        groups.RING_PG, groups.ULYSSES_PG = shard_groups  # globals of yunchang: another degree may have replaced them
        return extract(x[None], world.rank, world_size=world.size, rd=ring, ud=ulysses)

    return Prepared(shard, lambda q, k, v: attention(q, k, v, causal=True))


def pure_ulysses(case: Case, world: World) -> Prepared:
    need(not case.alibi, "hands the slopes of all heads to each rank's part of the heads")
    need_one_document(case, world.size)
    attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)
    return Prepared(
        lambda x: x[None].chunk(world.size, 1)[world.rank].contiguous(),
        lambda q, k, v: attention(q, k, v, causal=True),
    )


IMPLEMENTATIONS: dict[str, Prepare] = {
    "yunchang ring": partial(hybrid, ulysses=1),
    "yunchang Ulysses": pure_ulysses,
    "yunchang Ulysses 2 x ring": partial(hybrid, ulysses=2),
}
