"""Kinds of the fields of a configuration, told by their names.

transformers has no schema of configurations: `num_attention_heads`, `n_head`, `num_heads` and `decoder_attention_heads` are
one thing. `kind_of` sorts a field's name into a `Kind`; the sizes of a tiny copy are chosen by kind (`tiny_sizes`), never by
model type. A name that fits no pattern has no kind, and its value stays as it is.
"""

from __future__ import annotations

import enum
import functools
import re
from typing import Any


class Kind(enum.Enum):
    """Meaning of a configuration's field."""

    DROPOUT = "probability of dropout, or size of a random noise"
    TOKEN_ID = "token id"
    VOCABULARY = "rows of an embedding of tokens"
    POSITIONS = "longest sequence that positions are made for"
    ORIGINAL_POSITIONS = "length of pretraining, beyond which a RoPE changes"
    WINDOW = "tokens that a local attention, or a scaling by position, begins to act at"
    BLOCK = "tokens that are computed, pooled or chosen together"
    TOP_K_TOKENS = "keys, or blocks of keys, chosen for a query"
    EXPERTS = "experts of a layer"
    TOP_K_EXPERTS = "experts chosen for a token"
    EXPERT_GROUPS = "groups of experts"
    TOP_K_GROUPS = "groups of experts chosen for a token"
    LAYERS = "decoder, encoder or other layers of a stack"
    HEADS = "query heads, or heads of a state"
    KEY_VALUE_HEADS = "key and value heads"
    GROUPS = "groups that heads are shared out over"
    HEAD_DIM = "width of a head"
    HIDDEN = "width of the residual stream"
    EXPERT_INTERMEDIATE = "width inside an expert"
    INTERMEDIATE = "width inside an MLP"
    MULTIPLE = "number that a width is rounded up to a multiple of"
    RANK = "rank of a low-rank projection"
    STATE = "width of a state-space layer's state"
    WIDTH = "another width"


_WORD = r"(?:^|_)"  # the beginning of a word within a name

_PATTERNS: tuple[tuple[Kind, str], ...] = (
    (Kind.DROPOUT, r"drop|pdrop|jitter|noise"),
    (Kind.TOKEN_ID, r"token_(id|index|ids|indices)$|^(bos|eos|pad|unk|mask|sep|cls)_index$|suppress_tokens$|^lang_id$"),
    (Kind.VOCABULARY, r"vocab|^num_embeddings$|codebook_size$|num_centroids"),
    (Kind.ORIGINAL_POSITIONS, r"original_max_position|original_max_len|^(train_)?seq_length$"),
    (
        Kind.POSITIONS,
        r"max_position|^n_positions$|^n_ctx$|max_seq|max_target_pos|max_source_pos|context_length|model_max_length",
    ),
    # Before windows and blocks: "index_topk_blocks" counts choices.
    (Kind.TOP_K_TOKENS, r"index\w*top_?k|indexer_budget|top_?k_blocks|centroid\w*top_k"),
    (
        Kind.WINDOW,
        r"sliding_window(_size)?$|local_attention$|window(_size|_len)?$|attention_chunk_size$|floor_scale$|n_floor$|rel_extent$"
        r"|attn_chunk_length$",
    ),
    (Kind.BLOCK, r"^chunk_size$|mamba_chunk_size|block_size$|compress_(rate|ratio)|_compressed_\w*attention$"),
    (Kind.TOP_K_GROUPS, r"topk_group|top_k_group"),
    (Kind.EXPERT_GROUPS, r"^n_group$|expert_groups?$"),
    (
        Kind.TOP_K_EXPERTS,
        r"experts_per_tok|experts_per_token|(moe|expert\w*)_(top_?)?k$|top_?k_experts|experts_top_?k",
    ),
    (Kind.EXPERT_INTERMEDIATE, r"(moe|expert)\w*(intermediate|hidden|ffn|latent)\w*(size|dim)$"),
    (Kind.EXPERTS, r"experts$|expert_num$"),
    (
        Kind.LAYERS,
        r"^(num_|n_)?(hidden_|encoder_|decoder_|lstm_|conf_num_hidden_)?layers?$|^num_blocks$|^depth$|_hidden_layers$",
    ),
    (
        Kind.KEY_VALUE_HEADS,
        r"(key_value|kv|num_key)\w*heads|head_kv$|kv_n_heads|multi_query_group_num|query_groups$|linear_num_key_heads",
    ),
    (Kind.HEAD_DIM, r"head_?dim|head_size|" + _WORD + r"d_head$|dim_head$|^d_kv$|^kv_channels$|^rotary_dim$"),
    (Kind.HEADS, r"heads(_per_layer)?$|^n_head$|attention_heads|" + _WORD + r"n_heads$"),
    (Kind.GROUPS, r"n_?groups$|^o_groups$"),
    (Kind.MULTIPLE, r"multiple_of$"),
    (
        Kind.INTERMEDIATE,
        r"intermediate_size|ffn|feed_forward_size|^mlp_(dim|hidden)|^dff$|^d_ff$|^d_inner$|^n_inner$|^dim_ff$",
    ),
    (Kind.RANK, r"_rank$|lowrank$"),
    (Kind.STATE, r"state_size$|d_state$"),
    (
        Kind.HIDDEN,
        r"^(hidden_size|d_model|n_embd|dim_model|emb_dim|embed_dim|embedding_dim|dim)$",
    ),
    (
        Kind.WIDTH,
        r"(hidden|embed|embedding|router|lru|proj|mid|output|input|adapter|out|ssm|nemo)\w*_(size|dim|width)$|^d_rel$|_d_ssm$"
        r"|hidden_size_(per_layer_input|global)$|(output|conv|pw_out|separable_out)_channels?$",
    ),
)


@functools.cache
def kind_of(name: str | int) -> Kind | None:
    """Returns the kind of a field called `name`, or None where the name says nothing about sizes (a number never does)."""
    for kind, pattern in _PATTERNS:
        if re.search(pattern, str(name).lower()):
            return kind
    return None


def is_size(value: Any) -> bool:
    """True for a positive integer that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
