"""DeepSpeed's Ulysses (ALST) through Trainer: ParallelismConfig(sp_size=2, sp_backend="deepspeed"), ZeRO-1.

Two things hold it up without a GPU, and `on_cpu` mends them in this process; the packages are as installed. accelerate finds
no backend for DeepSpeed and believes that every rank is process 0 of 1, so that all train on the same data. DeepSpeed's
data loader gathers the ranks' sequences, each as long as it is, which NCCL does and gloo refuses.

The loss of a step is the mean of its micro-batches' means, its gradient twice as large: `_TokenWeighted` makes them
everybody else's. A sequence must be a multiple of the ranks, and is one document to attention: packs are silently
wrong.
"""

import os
from functools import partial
from typing import Any

from training_cases import Case, best_fit_decreasing

from training_peers import GivenStepsTrainer, MicroBatchRows, Prepare, Settings, Way, one_row, only, rows

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed.comm
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig

RANKS = 2


class _TokenWeighted(GivenStepsTrainer):
    """Weighs the losses of micro-batches; `weights` are in the order in which they run.

    Every rank goes backward from the whole loss, and the ranks' gradients are added up: gradients come out RANKS times as
    large, which Adam hides and clipping does not. Here they do not.
    """

    def __init__(self, weights: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = iter(weights)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs) * next(self.weights)
        return loss / RANKS + loss.detach() * (1 - 1 / RANKS)


def ulysses(case: Case, settings: Settings, packed: bool) -> Way:
    on_cpu()
    if packed:
        steps = [best_fit_decreasing({d: case.lengths[d] for d in step}, settings.pack_length) for step in case.steps]
    else:
        steps = [[(document,) for document in step] for step in case.steps]
    ordered, each_rank = rows(steps, RANKS)
    accumulation = RANKS * each_rank  # each loads half of the micro-batches, and takes part in all
    # A step's loss is the sum over micro-batches of mean / accumulation.
    weights = [
        accumulation * case.label_tokens(micro_batch) / case.label_tokens(documents)
        for documents, step in zip(case.steps, steps)
        for micro_batch in step
    ]
    return Way(
        partial(_TokenWeighted, weights, data_collator=only),
        MicroBatchRows(case, ordered, partial(one_row, multiple=2 * RANKS)),
        accumulation,
        {
            "use_cpu": False,
            "deepspeed": {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": "auto",
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": "auto",
                "communication_data_type": "fp32",
                "seq_parallel_communication_data_type": "fp32",
            },
            "parallelism_config": ParallelismConfig(
                sp_size=RANKS,
                sp_backend="deepspeed",
                dp_shard_size=1,
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
                ),
            ),
            "ddp_backend": "gloo",
        },
    )


def on_cpu() -> None:
    """Lets accelerate know which rank this process is. Told to use CPUs, it would not look at DeepSpeed."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    prepare, gather_equal = PartialState._prepare_backend, deepspeed.comm.all_gather

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, distributed_type = prepare(self, *args, **kwargs)
        return ("gloo" if backend is None else backend), distributed_type

    def gather(tensors: list[Any], tensor: Any, group: Any = None, **kwargs: Any) -> Any:
        if len({part.shape for part in tensors}) == 1:
            return gather_equal(tensors, tensor, group=group, **kwargs)
        tensors[dist.get_rank(group)].copy_(tensor)
        for rank, part in enumerate(tensors):
            dist.broadcast(part, group=group, group_src=rank)

    PartialState._prepare_backend = prepared  # type: ignore[method-assign]
    deepspeed.comm.all_gather = gather


WAYS: dict[str, Prepare] = {
    "DeepSpeed Ulysses sp=2": partial(ulysses, packed=False),
    "DeepSpeed Ulysses sp=2, packed": partial(ulysses, packed=True),
}
