"""ring-flash-attn: a zigzag ring, the same for packed documents, and Llama 3's all-gather."""

import sys
import types
from itertools import pairwise

import torch
from attention_cases import Case

from attention_peers import Prepare, Prepared, World, need, need_one_document

# Its adapters for transformers do not import with transformers 5, and its __init__ imports them; nothing here uses them.
_adapters = types.ModuleType("ring_flash_attn.adapters")
_adapters.substitute_hf_flash_attn = _adapters.update_ring_flash_attn_params = None  # type: ignore[attr-defined]
sys.modules.setdefault("ring_flash_attn.adapters", _adapters)

import ring_flash_attn  # noqa: E402


def need_no_alibi(case: Case) -> None:
    need(not case.alibi, "asserts that there are no ALiBi slopes")


def zigzag(case: Case, world: World) -> Prepared:
    need_no_alibi(case)
    need_one_document(case, 2 * world.size)
    rows = _zigzag_rows(case, world)
    return Prepared(
        lambda x: x[rows][None],
        lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True),
    )


def zigzag_varlen(case: Case, world: World) -> Prepared:
    need_no_alibi(case)
    multiple = 2 * world.size
    need(all(length % multiple == 0 for length in case.lengths), f"every document a multiple of {multiple} tokens")
    rows = _zigzag_rows(case, world)
    cu_seqlens = torch.tensor(case.boundaries, dtype=torch.int32) // world.size
    longest = max(case.lengths) // world.size
    return Prepared(
        lambda x: x[rows],
        lambda q, k, v: ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, longest, causal=True),
    )


def _zigzag_rows(case: Case, world: World) -> torch.Tensor:
    """Chunks rank and 2 * ranks - 1 - rank of each document."""
    chunks = [torch.arange(start, stop).chunk(2 * world.size) for start, stop in pairwise(case.boundaries)]
    return torch.cat(
        [chunk for parts in chunks for chunk in (parts[world.rank], parts[2 * world.size - 1 - world.rank])]
    )


def llama3(case: Case, world: World) -> Prepared:
    need_no_alibi(case)
    need(case.tokens % world.size == 0, f"tokens must be a multiple of {world.size}")
    *lengths, local_keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        torch.tensor(case.boundaries, dtype=torch.int32), True, world.rank, world.size
    )
    return Prepared(
        lambda x: x.chunk(world.size)[world.rank].contiguous(),
        lambda q, k, v: ring_flash_attn.llama3_flash_attn_varlen_func(
            q, k, v, *lengths, heads_k_stride=1, local_k_slice=local_keys, causal=True
        ),
    )


IMPLEMENTATIONS: dict[str, Prepare] = {
    "ring-flash-attn zigzag": zigzag,
    "ring-flash-attn zigzag varlen": zigzag_varlen,
    "ring-flash-attn llama3": llama3,
}
