"""Measures the memory of a micro-batch at the real widths of large models, on fake tensors of a CPU: what tensors take at their
fullest, by torch's MemTracker, beside what MemoryModel counts.

    python tests/fake_memory.py '{"model": "llama-8b", "ranks": 8, "tokens": 131072}'

Attention is torch's variable-length kernel for CUDA, through its meta functions: what it takes for itself while it runs is not
there, nor are communicators and the allocator's own. Peers are torch's "fake" process group.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.attention.kernels import KERNELS
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.planner.memory import MemoryModel
from hf_longctx.training import offload
from hf_longctx.training.activations import ActivationMemory
from tests.fake_cuda.steps import RANK, FakeExchange, configured, sharded, world


@dataclass(frozen=True)
class Case:
    """A micro-batch of one rank, with gradients of an earlier one."""

    model: str
    """one of fake_cuda.cases.MODELS"""
    ranks: int
    tokens: int
    """of one document over all ranks"""
    whole: bool = False
    """instead, of two documents on this rank alone"""
    sharding: str = "ddp"
    layers: int = 2
    checkpointing: bool = True
    keep_attention: bool = False
    keep_last_slice: bool = False
    ulysses: int = 1
    offload: float = 0.0


class OnAnyDevice(CudaVarlen):
    """The kernel, which has nothing against fake tensors of a CPU."""

    name = "on_any_device"

    def unsupported(self, q: torch.Tensor, k: torch.Tensor, needs: Any) -> str | None:
        return None


def measured(case: Case) -> dict[str, Any]:
    """The most bytes that tensors take at once, by kind, and the parts that MemoryModel counts."""
    config = configured(case.model, case.layers)
    sharding = {"sharding": case.sharding, "weight_bytes": 2 if case.sharding == "ddp" else 4}
    counted = MemoryModel.from_config(
        config,
        world_size=1 if case.whole else case.ranks,
        checkpointing=case.checkpointing,
        keep_attention=case.keep_attention,
        keep_last_slice=case.keep_last_slice,
        ulysses_degree=case.ulysses,
        **sharding,
    )
    split = zigzag(0, case.tokens, range(case.ranks))
    half = case.tokens // 2
    layout = Layout({RANK: (Segment(0, 0, half), Segment(1, 0, half))} if case.whole else split, ulysses=case.ulysses)
    tokens = layout.tokens(RANK)
    KERNELS[OnAnyDevice.name] = OnAnyDevice()
    offload.PLAIN = (*offload.PLAIN, FakeTensor)
    with world(case.ranks):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if case.sharding == "ddp" else torch.float32
            )
        patch_model(model, kernel=OnAnyDevice.name, liger_kernels=False, keep_last_slice=case.keep_last_slice)
        if case.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mesh = init_device_mesh("cpu", (case.ranks,)) if case.sharding != "ddp" else None
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu").train()
            steps = None if mesh is None else sharded(model, case.sharding, mesh)
            exchange = FakeExchange(ranks_per_node=case.ranks)
            for parameter in () if steps is not None else model.parameters():
                parameter.grad = torch.zeros_like(parameter)  # an earlier micro-batch's
            ids, rows = torch.zeros((1, tokens), dtype=torch.int64), torch.arange(tokens)
            memory = ActivationMemory(model, keep_attention="always" if case.keep_attention else "never", device="cpu")
            tracker = MemTracker()
            tracker.track_external(model, ids)
            with tracker:
                if steps is not None:
                    steps.gather()
                # FSDP2 makes gradients of its own in the first, and holds weights back in the last.
                for last in (True,) if steps is None else (False, False, True):
                    tracker.reset_mod_stats()
                    if steps is not None:
                        steps.before_micro_batch(last)
                    with memory.micro_batch(layout, RANK, case.offload):
                        loss = model(
                            input_ids=ids,
                            shift_labels=ids,
                            label_rows=rows,
                            layout=layout,
                            exchange=exchange,
                            num_items_in_batch=tokens,
                        ).loss
                        loss.backward()
    [by_kind] = tracker.get_tracker_snapshot("peak").values()
    kinds = {str(kind).rpartition(".")[2]: count for kind, count in by_kind.items()}
    parts = counted.parts(tokens, int(1000 * case.offload))
    return {
        "peak": kinds.pop("Total"),
        "kinds": kinds,
        "counted": {name: count for name, count in parts.items() if name != "optimizer"},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        print(json.dumps(measured(Case(**json.loads(text)))), flush=True)
