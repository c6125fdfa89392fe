"""Training steps of a tiny model whose allocated bytes are counted."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.attention.exchange import Exchange
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mistral, tiny_mixtral, tiny_mpt

CHUNK = 64
"""Rows of logits at once."""
KERNEL_SCRATCH = 1.1 * 2**20
"""Bytes that the CPU's flash backward takes for each thread, whatever the tokens."""
SMALL: dict[str, Callable[[torch.dtype], Any]] = {
    "llama": lambda dtype: tiny_llama(dtype, num_hidden_layers=3),
    "mistral, wide": lambda dtype: tiny_mistral(
        dtype, hidden_size=128, intermediate_size=352, num_attention_heads=8, sliding_window=512
    ),
    "llama, all heads": lambda dtype: tiny_llama(dtype, num_hidden_layers=3, num_key_value_heads=4),
    "mixtral": lambda dtype: tiny_mixtral(dtype, num_hidden_layers=3),
    "bloom": lambda dtype: tiny_bloom(dtype, n_layer=3),
    "mpt": lambda dtype: tiny_mpt(dtype, n_layers=3),
    "mpt, clipped": lambda dtype: tiny_mpt(dtype, n_layers=3, attn_config={"clip_qkv": 6.0}),
    "llama, large vocabulary": lambda dtype: tiny_llama(dtype, vocab_size=8192),
}
DEEP = {"llama, deep": lambda dtype: tiny_llama(dtype, num_hidden_layers=8, num_key_value_heads=4)}


class Step:
    """Forward and backward of one micro-batch over a layout, gradients of an earlier one there already."""

    def __init__(
        self, family: str, precision: str, checkpointing: bool, layout: Layout, exchange: Exchange | None = None
    ) -> None:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        self.model = patch_model((SMALL | DEEP)[family](dtype), loss_chunk_tokens=CHUNK).train()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.autocast = precision == "autocast"
        self.tokens = layout.tokens(exchange.rank if exchange is not None else 0)
        self.ids = torch.arange(self.tokens)[None] * 37 % 128
        self.call = {"layout": layout, "exchange": exchange, "num_items_in_batch": 100}

    def forward(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.model(input_ids=self.ids, shift_labels=self.ids, **self.call).loss


def one_document(tokens: int) -> Layout:
    return Layout({0: (Segment(0, 0, tokens),)})


def saved_bytes(step: Step) -> int:
    """Sum up all storages that forward keeps for backward, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.forward()  # the graph is alive until everything is counted, or addresses would be used again
    total = sum(storage.nbytes() for storage in saved.values())
    del loss
    return total


def allocated_bytes(step: Step) -> int:
    """The most that is allocated at once in forward and backward, weights and gradients left out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.forward().backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
