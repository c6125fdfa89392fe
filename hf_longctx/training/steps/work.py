"""The work of a planned step, and who runs it: the ranks of one stage (plain.py), or the stages of a pipeline (staged.py).

Both run this process's part of a step, and know what the processes of one arrangement do together outside of it: begin with
the same weights, sum gradients, take their norm. The trainer asks the one that it has, and need not know which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch

from hf_longctx.data.collator import RankStep
from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.training.memory.activations import ActivationMemory


@dataclass(frozen=True)
class Work:
    """The work on each micro-batch of a step."""

    backward: Callable[[torch.Tensor], Any] | None = None
    """None: the model is evaluated, and no backward follows. Else what runs the backward of a forward's result where a process
    has all layers; stages call autograd themselves"""
    result: Callable[[Any], torch.Tensor] = attrgetter("loss")
    """takes from the output of a micro-batch's forward what the step sums up, a scalar: here the loss, for other objectives
    something else"""
    router_loss: bool = True
    """whether a mixture of experts' balance loss is part of the loss, where the model has one"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """further ones of each forward that ends in a loss"""
    sharded: ShardedModel | None = None
    """the model under FSDP2, whose collectives the step times"""
    memory: ActivationMemory | None = None
    """what is kept between a forward and its backward, and where"""
    mark: Callable[[], None] | None = None
    """called before the first micro-batch and after each, where ranks' own times are measured"""

    @property
    def learns(self) -> bool:
        """Tell whether backwards follow forwards."""
        return self.backward is not None


class Steps(Protocol):
    """Runs this process's part of planned steps."""

    schedule: Schedule | None
    """of a pipeline's stages; known once a model is cut"""
    times_ranks: bool
    """whether the times of its micro-batches say how fast each rank is"""

    @property
    def bytes_sent(self) -> int:
        """Count the bytes that this process has sent so far in steps."""

    def refuse_other_cut(self, model: Any) -> None:
        """Raise ValueError for a model that holds other stages than this process runs."""

    def cut(self, model: Any) -> None:
        """Leave of a patched model what this process runs, in place."""

    def begin_alike(self, model: Any) -> None:
        """Give all processes that hold the same weights the same values of all of them. Collective."""

    def begin_trained_alike(self, trained: list[torch.nn.Parameter]) -> None:
        """Give them the same values of what is trained beside a model that was sharded when it was loaded. Collective."""

    def shard(self, model: Any, fsdp_plugin: Any) -> None:
        """Shard the model where accelerate would not do it right. Collective."""

    def run(self, model: Any, step: RankStep, work: Work) -> torch.Tensor:
        """Run this process's part of a step; the sum of what is returned over all processes is the result of the step."""

    def sum_gradients(
        self, model: Any, trained: list[torch.nn.Parameter], statistics: torch.Tensor, sharded: ShardedModel | None
    ) -> torch.Tensor:
        """Sum gradients over all processes that hold the same weights, in place, and statistics (float64 [k]) over all, which are
        returned. `sharded`: under FSDP2, which has summed what it holds in parts; a weight that no rank has used is left without
        a gradient, as in one process. Collective."""

    def gradient_norm(self, model: Any, maximum: float) -> torch.Tensor | None:
        """Return the norm of all gradients of the whole model, and clip them to `maximum`; None: Trainer's own way is right."""

    def describe(self) -> dict[str, float]:
        """Return what is logged of the last step beside what all have."""
