"""accelerate's context parallelism: torch's context_parallel (ring attention) with FSDP2, by ParallelismConfig(cp_size=2).

It knows CUDA only, in two places: accelerate takes the branch for CPUs before it looks at FSDP, and torch's ring has no
rule for the CPU's flash operation. `on_cpu` mends both in this process; the packages are as installed. Each sequence must
be a multiple of 2 * ranks (zigzag), and is one document to the ring: packs are silently wrong.
"""

from functools import partial
from typing import Any

import accelerate.state
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import TorchContextParallelConfig
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention
from training_cases import Case, best_fit_decreasing

from training_peers import GivenStepsTrainer, MicroBatchRows, Prepare, Settings, Way, one_row, only, rows

RANKS = 2
ring: Any = _attention
"""Not public, and typed for CUDA."""
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOKENS = 2
"""The dimension of [B, H, T, D] that is sharded."""


def context_parallel(case: Case, settings: Settings, packed: bool, exchange: str) -> Way:
    """`exchange`: how keys and values travel, "alltoall" (a ring) or "allgather"."""
    on_cpu()
    if packed:
        steps = [best_fit_decreasing({d: case.lengths[d] for d in step}, settings.pack_length) for step in case.steps]
    else:
        steps = [[(document,) for document in step] for step in case.steps]
    ordered, accumulation = rows(steps, 1)  # both ranks take part in every micro-batch
    return Way(
        partial(GivenStepsTrainer, data_collator=only),
        MicroBatchRows(case, ordered, partial(one_row, multiple=2 * RANKS)),
        accumulation,
        {
            "parallelism_config": ParallelismConfig(
                cp_size=RANKS, cp_handler=TorchContextParallelConfig(cp_comm_strategy=exchange)
            ),
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "reshard_after_forward": False,
                "cpu_ram_efficient_loading": False,
                "state_dict_type": "FULL_STATE_DICT",
            },
        },
    )


def on_cpu() -> None:
    """Lets accelerate and torch run context parallelism on gloo ranks of this process."""
    initialise = accelerate.state.AcceleratorState.__init__

    def initialised(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state and PartialState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        initialise(self, *args, **kwargs)

    accelerate.state.AcceleratorState.__init__ = initialised  # type: ignore[method-assign]
    ring.custom_ops |= {flash: _forward, flash_backward: _backward}


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _sharded(x: torch.Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(x, mesh, [Shard(TOKENS)], run_check=False)


def _forward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """DTensor's rule for the flash operation: q, k, v [B, H, T, D], ... -> out, lse [B, H, T]."""
    q, k, v = args[:3]
    dropout, causal = (*args[3:5], *(0.0, False)[len(args) - 3 :])

    def attend(q: Any, k: Any, v: Any, is_causal: bool = False, dropout_p: float = 0.0, scale: Any = None) -> Any:
        out, lse = flash(q, k, v, dropout_p, is_causal, scale=scale)
        return out, lse.contiguous()

    out, lse = ring._templated_ring_attention(
        q.device_mesh.get_group(),
        TOKENS,
        attend,
        query=_local(q),
        key=_local(k),
        value=_local(v),
        is_causal=causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )[:2]
    return _sharded(out, q.device_mesh), _sharded(lse, q.device_mesh)


def _backward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """DTensor's rule for its backward: grad_out, q, k, v, out, lse, dropout, causal -> dq, dk, dv."""
    mesh = next(x.device_mesh for x in args[1:4] if isinstance(x, DTensor))
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = {name: _local(x).contiguous() for name, x in zip(names, args)}

    def attend(*, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad_out: Any, **options: Any) -> Any:
        dropout, causal = options["dropout_p"], options["is_causal"]
        return flash_backward(grad_out, query, key, value, out, logsumexp, dropout, causal, scale=options.get("scale"))

    gradients = ring._templated_ring_attention_backward(
        mesh.get_group(),
        TOKENS,
        attend,
        grad_out_name="grad_out",
        dropout_p=args[6],
        is_causal=args[7],
        scale=kwargs.get("scale"),
        **tensors,
    )[:3]
    return tuple(_sharded(gradient, mesh) for gradient in gradients)


WAYS: dict[str, Prepare] = {
    "accelerate cp=2": partial(context_parallel, packed=False, exchange="allgather"),
    "accelerate cp=2, ring": partial(context_parallel, packed=False, exchange="alltoall"),
    "accelerate cp=2, packed": partial(context_parallel, packed=True, exchange="allgather"),
}
