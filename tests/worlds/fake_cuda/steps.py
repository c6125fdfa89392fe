"""Planned steps of one rank at the real widths of published models, on a GPU that is not there.

A step is planned, collated, pinned and run as in training; the peers are torch's "fake" process group, which sends nothing.
Layers are few, because all are alike: the first and the last keep what they save, those between may offload. Attention is the
kernel that training would choose, through its meta functions.
"""

import contextlib
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx import patch_model
from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.models.loss.loss_by_length import LossByLength
from hf_longctx.models.loss.token_metrics import TokenMetrics
from hf_longctx.models.stages import cut_model
from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.parallel.world import World
from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.training.execution import follow_layers, run_micro_batches
from hf_longctx.training.memory import activation_offload as offload
from hf_longctx.training.memory.activation_offload import HostMemory
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.traced import RecordingExchange, fake_world, in_fsdp2
from tests.worlds.fake_cuda import clocks
from tests.worlds.fake_cuda.arranged import distributed, router_counts, run_stage
from tests.worlds.fake_cuda.cases import MODELS, Case
from tests.worlds.fake_cuda.races import Raced, Work
from tests.worlds.fake_cuda.watch import Watched

RANK = 2
"""Whose step is run."""
SEED = 23


@dataclass(frozen=True)
class Ran:
    """A step that was run."""

    step: RankStep
    sent: int
    """bytes to other ranks"""
    offloaded: int
    """bytes to host memory"""


@dataclass(frozen=True)
class Seen:
    """What was seen of a step."""

    micro_batches: int
    split: int
    """of them, those of several ranks"""
    waits: dict[str, int]
    """what made the host wait, and the line that asked -> times"""
    copies: dict[str, int]
    """copies between host and device beside which the host went on"""
    sent: int
    """bytes to other ranks"""
    offloaded: int
    """bytes to host memory"""
    kernels: dict[str, int]
    """operations of attention -> times"""
    seconds: float


def configured(model: str, layers: int) -> Any:
    """The configuration of one of MODELS with so many layers."""
    fields = {name: value for name, value in asdict(MODELS[model]).items() if value is not None}
    return AutoConfig.for_model(fields.pop("model_type"), **fields | {"num_hidden_layers": layers})


def planned(case: Case, config: Any, world: World) -> RankStep:
    """The step of RANK that training would plan for documents of many lengths, one of them the longest."""
    drawn = np.random.default_rng(SEED).lognormal(8.0, 1.4, case.documents * case.ranks).astype(np.int64) + 2
    lengths = np.minimum(np.r_[case.longest, case.longest // 4, drawn], case.longest)
    node = max(1, case.ranks_per_node // case.tensor_parallel)
    topology = Topology(
        world_size=case.ranks,
        capacity=case.capacity,
        ranks_per_node=node,
        ulysses_degree=case.ulysses,
        stages=case.stages,
    )
    cost = CostModel.from_config(config, GPU, ranks_per_node=node, world_size=case.ranks)
    schedule = Schedule() if case.stages > 1 else None
    collator = LengthAwareCollator(topology, cost, RANK, mode=world.mode, schedule=schedule)
    return collator.collate(lengths, lengths - 1, lambda doc: {"input_ids": np.ones(int(lengths[doc]), np.int64)})


def run(case: Case, mode: TorchDispatchMode) -> Ran:
    """Run the step of a case, forward and backward, within `mode`."""
    config = configured(case.model, case.layers * case.stages)
    if config.model_type == "mixtral":
        config.output_router_logits = True
    degree, experts = case.tensor_parallel, case.expert_parallel
    world = World(case.ranks * degree * case.stages, case.sharding, case.stages, degree, experts)
    stage = min(1, case.stages - 1)
    """which gets activations and gradients, and sends both"""
    with fake_world(world.processes, (stage * case.ranks + RANK) * degree):
        step = planned(case, config, world)
        with torch.device("meta"):
            # accelerate's FSDP2 holds weights in float32 where it computes in half precision
            dtype = torch.bfloat16 if case.sharding == "ddp" or experts > 1 else torch.float32
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if degree > 1 or experts > 1:
            model = distributed(model, case)
        patch_model(model, liger_kernels=False, keep_last_slice=case.keep_last_slice)
        if case.stages > 1:
            layers = range(0, case.layers * case.stages, case.layers)
            cut_model(model, [range(first, first + case.layers) for first in layers], [stage])
        model.gradient_checkpointing_enable()
        offload.PLAIN = (*offload.PLAIN, FakeTensor)
        mesh = init_device_mesh("cuda", (case.ranks,)) if case.sharding != "ddp" and experts == 1 else None
        with FakeTensorMode(allow_non_fake_inputs=True), router_counts(case.router) if experts > 1 else nullcontext():
            device = torch.device("cuda")
            model.to_empty(device=device).train()
            in_parts = None if mesh is None else in_fsdp2(model, case.sharding, mesh)
            if experts > 1:
                in_parts = ShardedModel(model, case.sharding)
            exchange = RecordingExchange(ranks_per_node=case.ranks_per_node, groups=world.exchange_groups)
            memory = ActivationMemory(model, device=device)
            with mode, follow_layers(model, exchange.progress):
                step = step.pin_memory()
                observed = {"loss_by_length": LossByLength(device), "token_metrics": TokenMetrics(device)}
                if case.stages > 1:
                    sent = run_stage(model, step, exchange, world, memory, case.offload, observed)
                else:
                    run_micro_batches(
                        *(model, step, exchange, device, torch.Tensor.backward, None, in_parts, memory, case.offload),
                        agreed=True,
                        **observed,
                    )
                    sent = 0
    return Ran(step, exchange.bytes_sent + sent, memory.host.bytes_to_host)


def watched(case: Case) -> Seen:
    """Run a case and say what made the host wait."""
    mode, began = Watched(), time.monotonic()
    ran = run(case, mode)
    return Seen(
        micro_batches=len(ran.step.micro_batches),
        split=sum(len(micro_batch.layout.ranks) > 1 for micro_batch in ran.step.micro_batches),
        waits=dict(mode.waits),
        copies=dict(mode.copies),
        sent=ran.sent,
        offloaded=ran.offloaded,
        kernels={name: count for name, count in mode.operations.items() if "flash_attention" in name},
        seconds=round(time.monotonic() - began, 1),
    )


def raced(case: Case, control: str | None) -> dict[str, Any]:
    """Run a case and say which accesses of several streams are in no order; `control`: with one of CONTROLS taken away."""
    mode = Raced()
    with contextlib.ExitStack() as without:
        if control is not None:
            without.enter_context(patch.object(*CONTROLS[control]))
        ran = run(case, mode)
    return {
        "faults": dict(mode.faults),
        "accesses": mode.accesses,
        "communicators": mode.communicators,
        "offloaded": ran.offloaded,
    }


CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "waiting for messages": (Work, "wait", lambda work: True),
    "waiting for copies to the host": (HostMemory, "_free_before", lambda memory, number: memory._stash.clear()),
    "waiting for copies from the host": (clocks.Stream, "wait_event", lambda stream, event: None),
}
"""What order hangs on -> what is put in its place."""


def planted() -> dict[str, Any]:
    """Return what is seen of faults that a step could have; each must be seen."""
    mode, refused = Watched(), Counter[str]()
    with FakeTensorMode(allow_non_fake_inputs=True), mode:
        device = torch.device("cuda")
        here = torch.ones(1 << 20)
        on_device = here.to(device)  # blocking
        here.to(device, non_blocking=True)  # of pageable memory
        here.pin_memory().to(device, non_blocking=True)  # beside compute
        here[:8].to(device, non_blocking=True)  # small
        on_device.cpu()
        torch.tensor([1, 2], device=device)
        here.copy_(on_device, non_blocking=True)  # into pageable memory
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.Event().synchronize()
        for wrong in (
            lambda: on_device[0].item(),
            lambda: on_device.nonzero(),
            lambda: on_device + here,
            lambda: here @ on_device,
        ):
            try:
                wrong()
            except RuntimeError as error:
                # Of two devices torch 2.11 speaks in a plain RuntimeError.
                refused["two devices" if "two" in str(error) else type(error).__name__] += 1
    kinds = Counter(wait.partition(":")[0] for wait in mode.waits.elements())
    return {"waits": dict(kinds), "copies": dict(mode.copies), "refused": dict(refused)}
