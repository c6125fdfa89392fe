"""A Llama whose masks carry the layout, as those of any family do, beside the same Llama with the attention class of ours.

    python benchmarks/general_llama.py --check --json benchmarks/results/general_llama.json      # 1 minute

On two gloo ranks, with the same weights, over the same layouts: forward and backward, with and without activation checkpointing.
The attention layers of the general one are of a subclass of transformers' that hf_longctx does not know.

- bytes sent, attention kernel calls: of both ranks, forward and backward
- operations: calls of torch's operators; allocations, and the most bytes held at once, beyond those before
- CPU: seconds of the computing thread, medians; general over patched, the median over rounds of the ratio within one
- difference: of the loss and of the gradients (the largest entry's, over the largest of all)
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from allocated import count_on_all_threads
from ranks import on_ranks
from report import conclude, parser
from torch.profiler import ProfilerActivity, profile
from traffic import Traffic
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_longctx import Layout, patch_model, zigzag
from hf_longctx.attention.exchange import Exchange
from hf_longctx.models.patch import install
from hf_longctx.models.traits import Traits

RANKS = 2
DOCUMENT = 1024
"""Tokens of the one that is split; as many lie in packed documents."""
PACKED = 128
KERNELS = "flash_attention_for_cpu"
"""In the names of the operators that compute attention."""


class OtherLlamaAttention(LlamaAttention):
    """LlamaAttention under another class, which `patch_model` has none of its own for."""


@dataclass
class Measured:
    """One way on one rank."""

    bytes_sent: int
    kernel_calls: int
    operations: int
    allocations: int
    most_bytes: int
    loss: float
    gradients: list[torch.Tensor]
    seconds: list[float]


def models(checkpointing: bool) -> dict[str, Any]:
    """Make both ways of one Llama, float32."""
    made = {}
    for name in ("patched", "general"):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=DOCUMENT,
        )
        model = LlamaForCausalLM(config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if name == "general":
            for layer in model.model.layers:
                layer.self_attn.__class__ = OtherLlamaAttention
        made[name] = patch_model(model) if name == "patched" else install(model, Traits())
    return made


def layout_of() -> Layout:
    """Return one document over all ranks, and packed ones that are whole."""
    shards = {rank: list(segments) for rank, segments in zigzag(0, DOCUMENT, range(RANKS)).items()}
    for number in range(DOCUMENT // PACKED):
        rank = number % RANKS
        shards[rank] += zigzag(1 + number, PACKED, [rank])[rank]
    return Layout(shards)


def measure(rounds: int, checkpointing: bool) -> dict[str, Measured]:
    """On each rank: what both ways take."""
    count_on_all_threads()
    exchange, layout = Exchange(), layout_of()
    rank = dist.get_rank()
    ids = torch.randint(1024, (1, layout.tokens(rank)), generator=torch.Generator().manual_seed(rank))
    made = models(checkpointing)

    def run(model: Any) -> float:
        model.zero_grad()
        loss = model(
            input_ids=ids, layout=layout, exchange=exchange, shift_labels=ids, num_items_in_batch=2 * DOCUMENT
        ).loss
        loss.backward()
        return float(loss.detach())

    measured = {name: _counted(lambda model=model: run(model), model) for name, model in made.items()}  # type: ignore[misc]
    for number in range(rounds):
        names = list(made)[:: 1 if number % 2 else -1]
        for name in names:
            dist.barrier()
            begin = time.thread_time()
            run(made[name])
            measured[name].seconds.append(time.thread_time() - begin)
    return measured


def _counted(run: Callable[[], float], model: Any) -> Measured:
    run()  # warms up
    with Traffic() as traffic:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = run()
    operations = {
        operation.key: operation.count for operation in profiled.key_averages() if operation.key.startswith("aten::")
    }
    allocations, left = [], list(profiled.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while left:
        event = left.pop()
        left += event.children
        if event.tag.name == "Allocation":
            allocations.append(event)
    allocations.sort(key=lambda event: event.start_time_ns)
    fields = [event.extra_fields for event in allocations]
    held_before = fields[0].total_allocated - fields[0].alloc_size
    return Measured(
        traffic.sent,
        sum(count for name, count in operations.items() if KERNELS in name and "scaled_dot" in name),
        sum(operations.values()),
        sum(field.alloc_size > 0 for field in fields),
        max(field.total_allocated for field in fields) - held_before,
        loss,
        [parameter.grad.clone() for parameter in model.parameters()],
        [],
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--rounds", type=int, default=21, help="take the median of so many rounds (default: %(default)s)"
    )
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    rows, figures = [], {}
    for checkpointing in (False, True):
        case = "checkpointing" if checkpointing else "plain"
        ranks = on_ranks(measure, RANKS, arguments.rounds, checkpointing)
        for name in ("patched", "general"):
            runs = [rank[name] for rank in ranks]
            counts = {
                field.replace("_", " "): sum(getattr(run, field) for run in runs)
                for field in ("bytes_sent", "kernel_calls", "operations", "allocations", "most_bytes")
            }
            seconds = sum(statistics.median(run.seconds) for run in runs)
            rows.append(
                {"case": case, "way": name}
                | {key: str(value) for key, value in counts.items()}
                | {"CPU s": f"{seconds:.3f}"}
            )
            for key, value in (counts | {"CPU seconds": seconds}).items():
                figures[f"{case}/{name}/{key}"] = value
        for key in ("bytes sent", "kernel calls", "operations", "allocations", "most bytes"):
            figures[f"{case}/general over patched/{key}"] = (
                figures[f"{case}/general/{key}"] / figures[f"{case}/patched/{key}"]
            )
        figures[f"{case}/general over patched/CPU seconds"] = statistics.median(
            sum(general) / sum(patched)
            for general, patched in zip(
                *(zip(*(rank[name].seconds for rank in ranks)) for name in ("general", "patched"))
            )
        )
        figures[f"{case}/difference of loss"] = max(
            abs(rank["general"].loss - rank["patched"].loss) / rank["patched"].loss for rank in ranks
        )
        figures[f"{case}/difference of gradients"] = max(_difference(rank) for rank in ranks)
    status = conclude(arguments, rows, figures, load)
    print(
        "\n".join(f"{name}: {value:.4g}" for name, value in figures.items() if "over" in name or "difference" in name)
    )
    return status


def _difference(rank: dict[str, Measured]) -> float:
    pairs = list(zip(rank["general"].gradients, rank["patched"].gradients, strict=True))
    largest = max(float(right.abs().max()) for _, right in pairs)
    return max(float((ours - right).abs().max()) for ours, right in pairs) / largest


if __name__ == "__main__":
    sys.exit(main())
