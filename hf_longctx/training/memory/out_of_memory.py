"""Memory that ran out in one micro-batch: which one, what it held, and what to change, with its numbers.

The rank whose memory is exhausted ends with this error; its peers end because it does (their connections close, or the
launcher ends them). Nothing is sent between ranks here.
"""

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.layouts.layout import Layout
from hf_longctx.models.tiled_mlp import MlpForward
from hf_longctx.parallel.sharding import ShardedModel, tensor_parallel
from hf_longctx.planner import Topology
from hf_longctx.supervision.progress import Progress, ranks_in_words
from hf_longctx.training.measuring.measurements import host_peak

SAID_BY_ALLOCATORS = ("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
"""Parts of messages of torch's CPU allocator, the system, CUDA, cuBLAS and C++, which come as RuntimeErrors."""
FEWER = 0.75
"""Share of the micro-batch's tokens that is proposed as the next capacity to try."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, the device's or the host's, is exhausted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in SAID_BY_ALLOCATORS)


@contextlib.contextmanager
def explained(
    model: Any,
    layout: Layout,
    rank: int,
    topology: Topology,
    progress: Progress,
    device: torch.device,
    sharded: ShardedModel | None,
    offload: float,
) -> Iterator[None]:
    """Explain an out-of-memory error of one micro-batch.

    Args:
        rank: this one's number in the layout.
        offload: share of kept activations that waits in host memory, 0 to 1.

    Raises:
        torch.OutOfMemoryError: in place of any error that says the same with less; that one is its cause.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        proposals = "; or ".join(_proposals(model, layout, rank, topology, progress, sharded, offload))
        this = dist.get_rank() if dist.is_initialized() else 0
        raise torch.OutOfMemoryError(
            f"out of memory on rank {this} at {progress}: {_held(layout, rank, topology)}. {_memory(device)}. "
            f"Valid: {proposals}"
        ) from error


def _held(layout: Layout, rank: int, topology: Topology) -> str:
    """Return what the micro-batch is."""
    lengths = layout.doc_lengths
    longest = max(lengths, key=lambda doc: lengths[doc])
    holders = layout.split_documents.get(longest) or [of for of in layout.ranks if longest in layout.documents(of)]
    return (
        f"its micro-batch has {layout.tokens(rank)} tokens on this rank (capacity={topology.capacity}) and holds "
        f"{len(lengths)} document{'s' if len(lengths) > 1 else ''} on {ranks_in_words(layout.ranks)}; the longest has "
        f"{lengths[longest]} tokens on {len(holders)} of them"
    )


def _memory(device: torch.device) -> str:
    """Return what there was, at the moment of the error."""
    gib = 2.0**30
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        others = total - free - reserved
        return (
            f"Of {total / gib:.2f} GiB on {device}, {torch.cuda.memory_allocated(device) / gib:.2f} GiB were allocated, "
            f"{reserved / gib:.2f} GiB reserved, {free / gib:.2f} GiB free; the other {others / gib:.2f} GiB are "
            "CUDA's context, communicators and other programs, which no capacity makes smaller"
        )
    most = host_peak()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    allowed = "no limit is set (RLIMIT_AS)" if limit == resource.RLIM_INFINITY else f"it may have {limit / gib:.2f} GiB"
    return f"This process has held at most {most / gib:.2f} GiB of host memory; {allowed}"


def _proposals(
    model: Any,
    layout: Layout,
    rank: int,
    topology: Topology,
    progress: Progress,
    sharded: ShardedModel | None,
    offload: float,
) -> Iterator[str]:
    """Yield what may help, the least costly first; what is in use already is left out."""
    tokens, longest = layout.tokens(rank), max(layout.doc_lengths.values())
    capacity = max(1, int(min(tokens, topology.capacity) * FEWER))
    needed = -(-longest // capacity)
    if not topology.stay_whole:
        fits = (
            "" if needed <= topology.world_size else f", and there are {topology.world_size}: start more, or shorten it"
        )
        yield f"capacity={capacity}, with which the longest document needs {needed} ranks{fits}"
    elif needed == 1:
        yield f"capacity={capacity}, which holds the longest document"
    else:  # which no other rank can take a part of
        yield f"capacity={capacity} with long_documents='truncate' or 'split', as the longest document must stay whole on a rank"
    if progress.backward or torch.is_grad_enabled():
        if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            yield "gradient_checkpointing=True, which keeps each layer's input alone"
        if offload < 1:
            yield f"activation_offload=1.0 instead of {offload:g}, which keeps what layers save in host memory"
    tiled = any(isinstance(vars(module).get("forward"), MlpForward) for module in model.modules())
    if not tiled and tokens > 1:
        yield f"mlp_tile_tokens={max(1, tokens // 8)}, with which an MLP's inner activations take an eighth"
    if topology.stages > 1:  # whose ranks cannot meet in every micro-batch
        if topology.world_size > 1 and sharded is None and tensor_parallel(model) == 1:
            yield "sharding='zero1' instead of 'ddp', which splits the optimizer over the ranks of a stage"
        yield f"pipeline_stages > {topology.stages}, with which each rank holds fewer layers"
    elif topology.world_size > 1 and (sharded is None or sharded.sharding != "zero3"):
        used = "ddp" if sharded is None else sharded.sharding
        yield f"sharding='zero3' instead of {used!r}, which splits weights, gradients and optimizer over ranks"
