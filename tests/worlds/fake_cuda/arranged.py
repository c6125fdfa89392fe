"""Tensor and expert parallelism as transformers applies them when it loads a model, and a stage of a pipeline, for steps.py.

What experts get of the tokens is a value, which fake tensors have not. transformers asks for it once a layer, forward and in the
recomputation: the one place inside layers where its expert parallelism makes the host wait (its docstring says so). A stand-in
answers (cases.ROUTERS), and the wait is counted under that name.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import RankStep
from hf_longctx.parallel.stage_links import Links
from hf_longctx.parallel.world import World
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.steps.stage_tasks import StepOfDevice
from hf_longctx.training.steps.task_order import tasks_of
from tests.worlds.fake_cuda import clocks
from tests.worlds.fake_cuda.cases import SPLIT_SIZES, Case


def distributed(model: Any, case: Case) -> Any:
    """Spread a model without memory (meta) over processes, as transformers does before it loads weights."""
    shards = case.ranks if case.sharding != "ddp" else 1
    replicas = case.ranks // shards
    asked = DistributedConfig(
        tp_size=case.tensor_parallel,
        fsdp_size=shards,
        ep_size=case.expert_parallel,
        pp_size=replicas,  # copies that transformers leaves alone: neither sharded nor cut
    )
    kind = type(model)
    asked, _, meshes = kind.prepare_distribute_model(asked)
    asked.pp_size = 1
    # FSDP2 makes an empty tensor on the device.
    with patch.object(_fsdp_param_group.torch, "empty", _empty):
        return kind.maybe_distribute_model(model, asked, meshes)


def _empty(*shape: Any, make: Any = torch.empty, **options: Any) -> torch.Tensor:
    """torch.empty, on a GPU that is not there too."""
    with FakeTensorMode() if torch.device(options.get("device") or "cpu").type == "cuda" else contextlib.nullcontext():
        return make(*shape, **options)


def _split_sizes(rows: int, processes: int, router: str) -> list[list[int]]:
    """Say how many of so many choices go to each process of expert parallelism, and how many come from each."""
    first = rows // 2 if router == "half to one" else rows // processes
    rest, more = divmod(rows - first, processes - 1)
    sent = [first, *(rest + (at < more) for at in range(processes - 1))]
    return [sent, [rest] * processes]


@contextlib.contextmanager
def router_counts(router: str) -> Iterator[None]:
    """Answer for routers, of transformers from 5.23 on."""
    from transformers.distributed import expert_parallel

    dispatch = expert_parallel.AllToAllEP._dispatch_tokens

    def dispatch_tokens(experts: Any, hidden: Any, chosen: torch.Tensor, weights: Any) -> Any:
        def tolist(sizes: torch.Tensor) -> list[list[int]]:
            clocks.notice(SPLIT_SIZES)
            return _split_sizes(chosen.numel(), sizes.shape[1], router)

        with patch.object(FakeTensor, "tolist", tolist):
            return dispatch(experts, hidden, chosen, weights)

    with patch.object(expert_parallel.AllToAllEP, "_dispatch_tokens", dispatch_tokens):
        yield


def run_stage(
    model: Any,
    step: RankStep,
    exchange: Exchange,
    world: World,
    memory: ActivationMemory,
    offload: float,
    arguments: Mapping[str, Any],
) -> int:
    """Run the tasks of a process's stage; returns the bytes that its links have sent."""
    links = Links(world.pipelines, ring=False, timeout_seconds=60.0, progress=exchange.progress)
    StepOfDevice(
        *(model, step, tasks_of(step.tasks), links, exchange, torch.device("cuda"), torch.bfloat16, exchange.progress),
        router_coefficient=model.config.router_aux_loss_coef
        if getattr(model.config, "output_router_logits", False)
        else 0.0,
        memory=memory,
        offload=offload,
        arguments=arguments,
    ).run(learn=True)
    return links.bytes_sent
