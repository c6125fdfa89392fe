"""The fullest micro-batch of one rank on fake tensors, at the real widths of a model: what tensors take at their fullest, and
which messages leave. No weight exists, no GPU and no other rank: torch's "fake" process group stands for the others, torch's
FakeTensorMode for the device (as "cpu", so that nothing is compiled and a CUDA build is not in the way), and attention is torch's
kernel for CUDA, through its meta functions.

All layers of a kind are alike, so few of them are run, the first two of each kind and three in all (FSDP2 gathers weights of
up to three layers at a time); then the same with one more of one kind, for each of them, and the rest is counted on. A trace
with one more of every kind, or two where only one kind has more, checks that:

    bytes(all) = bytes(few) + sum over kinds of (layers of the kind - those among the few) * (bytes(one more of it) - bytes(few))

Not traced: what is no tensor's (communicators, CUDA's context, the allocator's own), what a kernel takes for itself while it
runs, and states of the optimizer. Nothing is sent.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.attention.communicators import LANES, Communicators
from hf_longctx.attention.exchange import Batch, Exchange, Pending
from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.layouts.layout import Layout
from hf_longctx.models import registered
from hf_longctx.models.layout_mask import LayoutMask
from hf_longctx.parallel.sharding import ShardedModel, even_placement
from hf_longctx.training.memory import activation_offload as offload
from hf_longctx.training.memory.activations import ActivationMemory


class Trace(NamedTuple):
    """A micro-batch that was traced, or counted on from such."""

    peak: int
    """bytes of all tensors at their fullest"""
    kinds: dict[str, int]
    """name -> bytes of them, as torch's MemTracker tells them apart"""
    sent: dict[int, int]
    """rank -> bytes that go to it, forward and backward"""
    messages: int
    """that leave"""
    seconds: float
    """of one core, that tracing took"""


@dataclass(frozen=True)
class Traceable:
    """One rank's micro-batch, and how its model is trained."""

    model_of: Callable[[Any], PreTrainedModel]
    """which layers -> the patched model on the meta device, of its weights' dtype as it is trained"""
    layout: Layout
    rank: int
    ranks: int
    ranks_per_node: int
    sharding: str
    keep_attention: bool = False
    offload: float = 0.0
    """share of the activations that wait in host memory, 0 to 1"""
    accumulating: bool = True
    """whether there are gradients of an earlier micro-batch"""
    autocast: bool = False
    """whether float32 weights are multiplied in bfloat16 without FSDP2"""

    def trace(self, layers: Any) -> Trace:
        """Run forward and backward with these layers, as `model_of` takes them."""
        began, tokens = time.process_time(), self.layout.tokens(self.rank)
        with (
            fake_world(self.ranks, self.rank),
            patch.object(offload, "PLAIN", (*offload.PLAIN, FakeTensor)),
            patch.object(offload, "_host_bytes", _elsewhere),
            patch.object(registered, "layout_mask", _with_values(registered.layout_mask)),
            patch.object(LayoutMask, "keeping", _with_values(LayoutMask.keeping)),
        ):
            model = self.model_of(layers)
            in_parts = self.sharding != "ddp" and self.ranks > 1
            mesh = init_device_mesh("cpu", (self.ranks,)) if in_parts else None
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu").train()
                model.tie_weights()  # each use of a shared weight was given memory of its own
                sharded = None if mesh is None else in_fsdp2(model, self.sharding, mesh)
                exchange = RecordingExchange(ranks_per_node=self.ranks_per_node) if self.ranks > 1 else None
                if sharded is None and self.accumulating:
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
                ids, rows = torch.zeros((1, tokens), dtype=torch.int64), torch.arange(tokens)
                keep = "always" if self.keep_attention else "never"
                memory = ActivationMemory(model, keep_attention=keep, device="cpu")
                tracker = MemoryTracker()
                tracker.track_external(model, ids)
                with tracker:
                    if sharded is not None:
                        sharded.gather()
                    # FSDP2 makes gradients of its own in the first, and holds weights back in the last.
                    for last in (True,) if sharded is None else (False, False, True):
                        tracker.reset_mod_stats()
                        if exchange is not None:
                            exchange.sent.clear()
                        if sharded is not None:
                            sharded.before_micro_batch(last)
                        with memory.micro_batch(self.layout, self.rank, self.offload), self._precision():
                            loss = model(
                                input_ids=ids,
                                shift_labels=ids,
                                label_rows=rows,
                                layout=self.layout,
                                exchange=exchange,
                                num_items_in_batch=tokens,
                            ).loss
                            loss.backward()
        by_kind = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        kinds = {str(kind).rpartition(".")[2].lower(): count for kind, count in by_kind.items()}
        sent = exchange.sent if exchange is not None else Counter[tuple[int, str]]()
        return Trace(
            kinds.pop("total"),
            kinds,
            {peer: count for (peer, what), count in sent.items() if what == "bytes"},
            sum(count for (_, what), count in sent.items() if what == "messages"),
            time.process_time() - began,
        )

    def _precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def _elsewhere(count: int, *, pinned: bool) -> torch.Tensor:
    """uint8 [count], on another device than what stands for the GPU: host memory is not counted with it."""
    return torch.empty(count, dtype=torch.uint8, device="meta")


NO_HOOK = RemovableHandle(OrderedDict())


class MemoryTracker(MemTracker):
    """torch's tracker of memory, also of models that are frozen in part, and of tiles.

    It hooks the gradient of every weight, and frozen ones have none; it asks for the graph of a module's inputs, and those of a
    tile have none.
    """

    def __init__(self) -> None:
        super().__init__()
        follow = self._mod_tracker._fw_pre_hook

        def before(module: torch.nn.Module, inputs: Any) -> None:
            follow(module, inputs if torch.is_grad_enabled() else ())

        self._mod_tracker._fw_pre_hook = before  # type: ignore[method-assign]

    def _track_module_params_and_buffers(
        self, module: torch.nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles.setdefault(parameter, (NO_HOOK, NO_HOOK))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function on tensors with values: a mask is asked about a few positions on the CPU, whatever computes."""

    def run(*given: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*given, **named)

    return run


@dataclass(frozen=True)
class Choice:
    """Layers that are run, by their numbers in the whole model."""

    few: tuple[int, ...]
    more: tuple[tuple[tuple[int, ...], int], ...]
    """for each kind of which there are more: the few and one more of it, and how many there are beyond the few"""
    check: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Sequence[Any]) -> Choice:
        """Choose layers.

        Args:
            kinds: of each layer.

        Raises:
            ValueError: as many layers would be run as there are.
        """
        numbers = {kind: [i for i, of_layer in enumerate(kinds) if of_layer == kind] for kind in dict.fromkeys(kinds)}
        first = LAYERS_AT_ONCE if len(numbers) == 1 else 2
        few = tuple(sorted(i for of_kind in numbers.values() for i in of_kind[:first]))
        further = [of_kind[first:] for of_kind in numbers.values() if len(of_kind) > first]
        checked = further[0][:2] if len(further) == 1 else [of_kind[0] for of_kind in further]
        check = tuple(sorted((*few, *checked)))
        if len(checked) < 2 or len(check) > MOST_LAYERS:
            raise ValueError(
                f"--trace counts on from a few layers, and {len(check)} of {len(kinds)} layers, of {len(numbers)} kind(s), would "
                f"be run at a time. Valid: {LAYERS_AT_ONCE + 2} layers of one kind or more, and {MOST_LAYERS} at a time at most"
            )
        more = tuple((tuple(sorted((*few, of_kind[0]))), len(of_kind)) for of_kind in further)
        return cls(few, more, check)


LAYERS_AT_ONCE = 3
"""Most layers that FSDP2 gathers at a time."""
MOST_LAYERS = 12
"""Most layers that are run at a time: each takes seconds at widths of 8B."""


def counted_on(few: Trace, more: Sequence[tuple[Trace, int]]) -> Trace:
    """Count on from the trace of the few layers.

    Args:
        more: for each kind the trace with one more, and how many there are beyond the few.
    """

    def grown(value: Callable[[Trace], int]) -> int:
        return value(few) + sum(further * (value(longer) - value(few)) for longer, further in more)

    def of_kind(kind: str) -> int:
        return grown(lambda trace: trace.kinds.get(kind, 0))

    def to_peer(peer: int) -> int:
        return grown(lambda trace: trace.sent.get(peer, 0))

    return Trace(
        grown(lambda trace: trace.peak),
        {kind: of_kind(kind) for kind in few.kinds},
        {
            peer: to_peer(peer)
            for peer in {peer: 0 for trace in (few, *(longer for longer, _ in more)) for peer in trace.sent}
        },
        grown(lambda trace: trace.messages),
        few.seconds + sum(longer.seconds for longer, _ in more),
    )


class RecordingExchange(Exchange):
    """The exchange over a group that sends nothing; it notes what would be sent to whom."""

    def _make_communicators(
        self, groups: Sequence[Sequence[int]], ranks_per_node: int, timeout: timedelta, meet_all: bool
    ) -> Communicators:
        self.sent = Counter[tuple[int, str]]()
        """(rank, "bytes" or "messages") -> how many"""
        return Communicators({lane: dist.new_group() for lane in LANES})

    def begin(self, batch: Batch) -> Pending:
        for peer, size in batch.sent:
            self.sent[peer, "bytes"] += size
            self.sent[peer, "messages"] += 1
        return super().begin(batch)


class OnAnyDevice(CudaVarlen):
    """torch's kernel for CUDA, which has nothing against fake tensors of a CPU."""

    name = "on_any_device"

    def unsupported(self, call: AttentionCall) -> str | None:
        return None


@contextmanager
def kernel_on_any_device() -> Iterator[str]:
    """Offer OnAnyDevice by the name that is given."""
    KERNELS[OnAnyDevice.name] = OnAnyDevice()
    try:
        yield OnAnyDevice.name
    finally:
        del KERNELS[OnAnyDevice.name]


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[None]:
    """Make this process one of so many ranks, none of the others being there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_fsdp2(model: PreTrainedModel, sharding: str, mesh: DeviceMesh) -> ShardedModel:
    """Spread a model by FSDP2 as accelerate does: layers, embeddings and head, and the rest, gathered in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied = ends[0].weight is ends[1].weight
    for module in (*layers, *([ends] if tied else ends), model):  # a weight belongs to one part
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=sharding == "zero3",
            shard_placement_fn=even_placement(mesh.size()),
        )
    return ShardedModel(model, sharding)  # type: ignore[arg-type]
