"""DeepSpeed's Ulysses for Hugging Face models (ALST)."""

import os
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import Case
from torch.nn.functional import scaled_dot_product_attention

from attention_peers import Prepare, Prepared, World, need, need_one_document

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed.comm
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF


def ulysses(case: Case, world: World) -> Prepared:
    need(not case.alibi, "does not tell the attention function whose slopes its heads need")
    need_one_document(case, world.size)
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    tokens = case.tokens // world.size
    attention = UlyssesSPAttentionHF(
        _attend, 1, case.heads, case.head_dim, case.kv_heads, 1, dist.group.WORLD, seq_length_is_variable=True
    )
    module: Any = torch.nn.Module()
    module.num_key_value_groups = case.heads // case.kv_heads
    positions = torch.arange(case.tokens).chunk(world.size)[world.rank][None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = attention(module, q, k, v, None, position_ids=positions)
        return out.view(1, tokens, case.heads, case.head_dim).transpose(1, 2)

    return Prepared(lambda x: x.chunk(world.size)[world.rank].transpose(0, 1)[None].contiguous(), attend)


def _attend(module, q, k, v, attention_mask, *args, **kwargs):
    """Return what transformers' attention functions are called like: [B, H, T, D] -> [B, T, H, D]."""
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous(), None


IMPLEMENTATIONS: dict[str, Prepare] = {"DeepSpeed Ulysses": ulysses}
