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
from torch.overrides import TorchFunctionMode
from transformers.distributed import expert_parallel
from transformers.distributed.configuration_utils import DistributedConfig

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import RankStep
from hf_longctx.parallel.world import World
from hf_longctx.training.activations import ActivationMemory
from hf_longctx.training.steps.links import Links
from hf_longctx.training.steps.order import tasks_of
from hf_longctx.training.steps.stage_tasks import StepOfDevice
from tests.fake_cuda import clocks
from tests.fake_cuda.cases import Case

SPLIT_SIZES = "tokens of each expert"
"""Name of the wait."""


def distributed(model: Any, case: Case) -> Any:
    """Spread a model without memory (meta) over processes, as transformers does before it loads weights."""
    shards = case.ranks if case.sharding != "ddp" else 1
    replicas = case.ranks // shards
    asked = DistributedConfig(
        tp_size=case.tensor_parallel,
        fsdp_size=shards,
        dp_replicate_size=1,
        ep_size=case.expert_parallel,
        pp_size=replicas,  # copies that transformers leaves alone: neither sharded nor cut
    )
    kind = type(model)
    asked, _, meshes = kind.prepare_distribute_model(asked)
    asked.pp_size = 1
    return kind.maybe_distribute_model(model, asked, meshes)


class _RouterCounts(TorchFunctionMode):
    """Answers how many tokens go to each process of expert parallelism, and come from each."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self._router = router
        self.rows = 0
        """choices of experts by this process's tokens"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.tolist or args[0].ndim != 2 or len(args[0]) != 2:
            return func(*args, **(kwargs or {}))
        clocks.notice(SPLIT_SIZES)
        others = args[0].shape[1]
        first = self.rows // 2 if self._router == "half to one" else self.rows // others
        rest, more = divmod(self.rows - first, others - 1)
        sent = [first, *(rest + (at < more) for at in range(others - 1))]
        received = [first if self._router == "half to one" else rest] * others
        return [sent, received]


@contextlib.contextmanager
def router_counts(router: str) -> Iterator[None]:
    """Answer for routers."""
    dispatch = expert_parallel.AllToAllEP._dispatch_tokens

    def noted(experts: Any, hidden: Any, chosen: torch.Tensor, weights: Any) -> Any:
        answers.rows = chosen.numel()
        return dispatch(experts, hidden, chosen, weights)

    with _RouterCounts(router) as answers, patch.object(expert_parallel.AllToAllEP, "_dispatch_tokens", noted):
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
        memory=memory,
        offload=offload,
        arguments=arguments,
    ).run(learn=True)
    return links.bytes_sent
