"""A model's real widths over a layout on an accelerator that is not there: torch's fake tensors, which have shape, dtype and
device and no values, on a device of Python's own (torch's PrivateUse1). A tensor of another device in an operation is an error,
as on a GPU, and so is whoever asks for a value.

    python tests/attention/fake_accelerator.py        # Qwen3-8B's widths, two layers, two virtual ranks

The device belongs to the whole process: a test runs this as a program. Attention is a kernel without arithmetic, which checks
what it is given as flash-attention's varlen functions are called.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, Qwen3Config

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.attention.kernels.varlen import Triple, VarlenCall, VarlenKernel
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.models import layout_mask, registered

DEVICE = "gpu"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 4096, 32, 8, 128, 151936, 2
LOSS_CHUNK = 1024
SPLIT, WHOLE = 9000, ((700, 33, 512), (1200, 5))
"""Tokens of a document on both ranks, and of those that are whole on each."""


def layout() -> Layout:
    """Three documents on rank 0 beside its part of the split one, two on rank 1."""
    shards = zigzag(0, SPLIT, range(2))
    first = 1
    for rank, lengths in enumerate(WHOLE):
        shards[rank] += tuple(Segment(first + i, 0, length) for i, length in enumerate(lengths))
        first += len(lengths)
    return Layout(shards)


class CheckedCalls(VarlenKernel):
    """Notes its calls; results have shapes only."""

    name = "checked_calls"

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        return None

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256

    def unsupported(self, call: AttentionCall) -> str | None:
        return None if call.q.device.type == DEVICE else f"q is on {call.q.device}"

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._check("forward", call)
        assert call.scale == HEAD_DIM**-0.5
        assert call.slopes is call.softcap is None
        q = call.q
        return torch.empty_like(q), q.new_empty((HEADS, len(q)), dtype=torch.float32)

    def run_backward(self, call: VarlenCall, grad_out, out, lse) -> Triple:
        self._check("backward", call)
        q = call.q
        for like_q in (grad_out, out):
            assert (like_q.shape, like_q.dtype, like_q.device) == (q.shape, q.dtype, q.device)
            assert like_q.stride(-1) == 1
        assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((HEADS, len(q)), torch.float32, True)
        return torch.empty_like(q), torch.empty_like(call.k), torch.empty_like(call.v)

    def _check(self, direction: str, call: VarlenCall) -> None:
        q, k, v, sequences, *_ = call
        self.seen[f"{direction} {sequences.mask.name.lower()}"] += 1
        for tensor, heads, rows in (
            (q, HEADS, sequences.queries),
            (k, KV_HEADS, sequences.keys),
            (v, KV_HEADS, sequences.keys),
        ):
            assert tensor.shape == (rows.total, heads, HEAD_DIM), tensor.shape
            assert (tensor.dtype, tensor.device.type, tensor.stride(-1)) == (torch.bfloat16, DEVICE, 1)
            assert (rows.cu_seqlens.dtype, rows.cu_seqlens.device.type) == (torch.int32, DEVICE)
            assert isinstance(rows.longest, int)


class Watched(TorchDispatchMode):
    """Looks at every operation: what is too large, and what makes the host wait for the device."""

    def __init__(self, tokens: set[int]) -> None:
        super().__init__()
        self.tokens, self.too_large, self.waits = tokens, set[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self._look(name, tensor)
        if name in ("_to_copy", "copy_", "_local_scalar_dense"):
            source = args[1] if name == "copy_" else args[0]
            target = output if isinstance(output, torch.Tensor) else torch.empty(0)
            if source.device.type == DEVICE and target.device.type == "cpu":
                self.waits[name] += 1
        return output

    def _look(self, name: str, tensor: torch.Tensor) -> None:
        sizes = [
            size for size, stride in zip(tensor.shape, tensor.stride()) if stride
        ]  # an expanded mask takes no memory
        squares = sum(size in self.tokens for size in sizes) > 1
        logits = VOCABULARY in sizes and tensor.numel() > LOSS_CHUNK * VOCABULARY and HIDDEN not in sizes
        if squares or logits:
            self.too_large.add(f"{name} {tuple(tensor.shape)}")


@contextmanager
def without_values(watched: Watched) -> Iterator[None]:
    """Within it, the two questions about values outside decoder layers have answers: what a mask means, which is asked on the
    host, and which rows have a label, once a forward. Masks, which nobody may compute with, are no fake tensors."""
    make = layout_mask.layout_mask

    def on_the_host(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args, device="meta", **kwargs)

    def all_rows(self: torch.Tensor) -> torch.Tensor:
        watched.waits["nonzero"] += 1
        return torch.arange(self.numel(), device=self.device).unsqueeze(1)

    with patch.object(torch.Tensor, "nonzero", all_rows), patch.object(registered, "layout_mask", on_the_host):
        yield


def main() -> dict[str, Any]:
    """Run forward and backward, and return what was seen."""
    kernel = CheckedCalls()
    KERNELS[kernel.name] = kernel
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=12288,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=40960,
    )
    plan = layout()
    watched = Watched({plan.tokens(rank) for rank in plan.ranks} | {SPLIT})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        pass  # first in this thread: a torch built for CUDA, without a GPU, goes on using what the first thread has made

    models = []
    for _ in plan.ranks:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        models.append(patch_model(model, kernel=kernel.name, loss_chunk_tokens=LOSS_CHUNK, liger_kernels=False))
    _setup_privateuseone_for_python_backend(DEVICE)
    torch.get_device_module(DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]

    def on_rank(exchange: Any) -> dict[str, Any]:
        model = models[exchange.rank]
        with mode, watched, without_values(watched):
            model.to_empty(device=DEVICE).train()
            model.gradient_checkpointing_enable()
            ids = torch.zeros((1, plan.tokens(exchange.rank)), dtype=torch.int64, device=DEVICE)
            loss = model(
                input_ids=ids,
                shift_labels=ids,
                layout=plan,
                exchange=exchange,
                num_items_in_batch=sum(map(plan.tokens, plan.ranks)),
            ).loss
            assert (loss.device.type, loss.dtype, loss.shape) == (DEVICE, torch.float32, ())
            loss.backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert (parameter.grad.dtype, parameter.grad.device.type) == (torch.bfloat16, DEVICE), name
        return {"bytes_sent": exchange.bytes_sent}

    ranks = run_on_virtual_ranks(2, on_rank, device=f"{DEVICE}:0")
    return {
        "calls": dict(kernel.seen),
        "bytes_sent": [rank["bytes_sent"] for rank in ranks],
        "too_large": sorted(watched.too_large),
        "waits": dict(watched.waits),
        "planted": planted(mode, watched.tokens),
    }


def planted(mode: FakeTensorMode, tokens: set[int]) -> dict[str, Any]:
    """Return what is seen of faults that a model could have: a mask of tokens by tokens, logits of all tokens, a copy to
    the host, a value that is asked for, a tensor of another device."""
    watched = Watched(tokens)
    refused = []
    with mode, watched:
        on_device = torch.ones((SPLIT, SPLIT), dtype=torch.bool, device=DEVICE)
        torch.empty((SPLIT, VOCABULARY), device=DEVICE)
        on_device[0].cpu()
        for wrong in (lambda: on_device[0].any().item(), lambda: on_device + torch.ones(SPLIT)):
            try:
                wrong()
            except RuntimeError as error:
                # Of two devices torch 2.11 speaks in a plain RuntimeError.
                refused.append("two devices" if "two" in str(error) else type(error).__name__)
    return {"too_large": len(watched.too_large), "waits": sum(watched.waits.values()), "refused": refused}


if __name__ == "__main__":
    print(json.dumps(main()))
