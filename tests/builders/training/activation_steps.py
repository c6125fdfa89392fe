"""A step of a tiny model with its activations kept, offloaded or computed again, alone and on ranks."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from hf_longctx import Layout, Segment, patch_model
from hf_longctx.attention.exchange import Exchange
from hf_longctx.training.memory.activations import ActivationMemory
from tests.builders.tiny_models import FAMILIES
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import worker_state

PACKED = Layout({0: (Segment(0, 0, 9), Segment(1, 0, 30), Segment(2, 0, 1))})
LAYERS = {"bloom": "n_layer", "mpt": "n_layers"}
"""Name of a family's number of layers where it is not transformers' usual one."""


def model_of(family: str, checkpointing: bool = False, **patch: Any) -> Any:
    model = FAMILIES[family](torch.float32, **{LAYERS.get(family, "num_hidden_layers"): 4})
    model = patch_model(model, loss_chunk_tokens=16, **patch).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def step(
    model: Any, layout: Layout, memory: ActivationMemory | None, offload: float = 0.0, exchange: Exchange | None = None
) -> dict[str, torch.Tensor]:
    """One micro-batch: the loss and every gradient."""
    rank = 0 if exchange is None else exchange.rank
    ids = torch.arange(layout.tokens(rank))[None] * 37 % 128 + rank
    with memory.micro_batch(layout, rank, offload) if memory is not None else nullcontext():
        loss = model(
            input_ids=ids,
            shift_labels=ids,
            layout=layout,
            exchange=exchange,
            num_items_in_batch=100,
            num_tokens_in_batch=100,
        ).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | gradients


def check_equal(answer: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert answer.keys() == right.keys()
    assert [name for name in right if not torch.equal(answer[name], right[name])] == []


def run_held(
    family: str, layout: Layout, checkpointing: bool, keep: str, offload: float, sharded: bool, **patch: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """On one rank: loss, gradients of both ranks together, and bytes sent for attention."""
    if "exchange" not in worker_state:
        worker_state["exchange"] = Exchange()
    exchange = worker_state["exchange"]
    model = model_of(family, checkpointing, **patch)
    with in_order_communicators():
        if sharded:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        memory = ActivationMemory(model, keep_attention=keep, device="cpu")
        before = exchange.bytes_sent
        answer = step(model, layout, memory, offload, exchange)
        sent = exchange.bytes_sent - before
        if sharded:
            mean = {name: value.full_tensor() for name, value in answer.items() if name != "loss"}
            answer |= {name: 2 * value for name, value in mean.items()}
        else:
            for name, value in answer.items():
                if name != "loss":
                    dist.all_reduce(value)
    return answer, sent
