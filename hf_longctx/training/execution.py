"""Running one rank's part of a planned step: its micro-batches, one after another, in the plan's global order.

Communication happens inside the model (keys, values and their gradients, on the exchange's own process group) and
nowhere else here. Every rank of a layout runs its forward and its backward, also where it holds no label: its peers
need what it sends.
"""

from collections.abc import Callable
from typing import Any

import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import RankStep


def run_micro_batches(
    model: torch.nn.Module,
    step: RankStep,
    exchange: Exchange | None,
    device: torch.device,
    backward: Callable[[torch.Tensor], Any] | None = None,
    mark: Callable[[], None] | None = None,
    **forward_arguments: Any,
) -> torch.Tensor:
    """Runs the step's micro-batches through a patched model, and `backward` on each loss where it is given.
    `mark` is called before the first and after each.

    Raises:
        ValueError: the plan was made for another number of ranks.

    Returns:
        float64 scalar: this rank's part of the loss of the step; the sum over ranks is the loss. Zero without a
        micro-batch.
    """
    ranks = exchange.world_size if exchange is not None else 1
    if step.plan.world_size != ranks:
        raise ValueError(
            f"the plan was made for {step.plan.world_size} ranks, and there are {ranks}: plan the step again for {ranks} ranks"
        )
    total = torch.zeros((), dtype=torch.float64, device=device)
    if mark is not None:
        mark()
    for micro_batch in step.micro_batches:
        micro_batch = micro_batch.to(device)
        loss = model(
            input_ids=micro_batch.input_ids,
            shift_labels=micro_batch.shift_labels,
            layout=micro_batch.layout,
            exchange=exchange,
            num_items_in_batch=step.num_items,
            num_tokens_in_batch=step.num_tokens,
            **forward_arguments,
        ).loss
        if backward is not None:
            backward(loss)
        total += loss.detach()
        if mark is not None:
            mark()
    return total
