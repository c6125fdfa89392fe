"""The central promise: any layouts on any number of ranks give the loss and every gradient of one process.

Reference: plain transformers on each document alone (tests/builders/plain_reference.py). Ours: a patched model, random layouts
of any degree of Ulysses, several of them per rank or none, ranks without a label, with and without activation checkpointing,
plainly and with NCCL's in-order communicators. Losses and gradients of all ranks are summed.

Tolerances, relative to the largest gradient of a parameter: 1e-4 in float32 with the CPU kernel; 1e-10 in float64 with the
reference kernel, also where transformers' own loss functions, kept from float32, are the reference; 5e-2 for models in
bfloat16, whose every layer rounds to 8 bits, against float32 (a Mixtral in bfloat16 may choose other experts, and is compared
at the level of attention: tests/attention/test_modes.py).
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx import patch_model
from hf_longctx.attention.exchange import Exchange
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from tests.builders.plain_reference import reference_loss
from tests.builders.plans.random_layouts import steps
from tests.builders.tiny_models import FAMILIES
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool, worker_state

HEADS = 4
"""Query heads of the models: what a degree of Ulysses divides."""
EXAMPLES_A_CALL = 4
"""Random steps per call of a pool, so that one call's latency is shared."""


@dataclass(frozen=True)
class Case:
    """How a step is run and compared."""

    family: str
    dtype: torch.dtype
    kernel: str
    tolerance: float
    stock_losses: bool = False
    experts: str = "eager"
    checkpointing: bool = False
    in_order: bool = False

    def model(self) -> Any:
        experts = {"experts_implementation": self.experts} if self.family == "mixtral" else {}
        return FAMILIES[self.family](self.dtype, **experts)


EXACT = {
    "llama-float32": Case("llama", torch.float32, "cpu_flash", 1e-4),
    "llama-float64": Case("llama", torch.float64, "reference", 1e-10),
    "llama-float64-flash": Case("llama", torch.float64, "cpu_flash", 1e-10, checkpointing=True),
    "llama-stock-loss": Case("llama", torch.float64, "reference", 1e-10, stock_losses=True),
    "mixtral-float32": Case("mixtral", torch.float32, "cpu_flash", 1e-4),
    "mixtral-float32-grouped": Case("mixtral", torch.float32, "cpu_flash", 1e-4, experts="grouped_mm"),
    "mixtral-float64": Case("mixtral", torch.float64, "reference", 1e-10),
    "mixtral-float64-checkpointing": Case("mixtral", torch.float64, "reference", 1e-10, checkpointing=True),
    "mixtral-window": Case("mixtral-window", torch.float64, "cpu_flash", 1e-10),
    "mistral-float32": Case("mistral", torch.float32, "cpu_flash", 1e-4),
    "mistral-float64": Case("mistral", torch.float64, "cpu_flash", 1e-10, checkpointing=True),
    "bloom-float32": Case("bloom", torch.float32, "cpu_flash", 1e-4),
    "bloom-float64": Case("bloom", torch.float64, "cpu_flash", 1e-10, checkpointing=True),
    "mpt-float32": Case("mpt", torch.float32, "cpu_flash", 1e-4),
    "mpt-float64": Case("mpt", torch.float64, "cpu_flash", 1e-10),
    "llama-bfloat16": Case("llama", torch.bfloat16, "cpu_flash", 5e-2),
    "mistral-bfloat16": Case("mistral", torch.bfloat16, "cpu_flash", 5e-2),
    "bloom-bfloat16": Case("bloom", torch.bfloat16, "cpu_flash", 5e-2),
    "mpt-bfloat16": Case("mpt", torch.bfloat16, "cpu_flash", 5e-2),
    "mixtral-stock-loss": Case("mixtral", torch.float64, "reference", 1e-10, stock_losses=True),
}


def make_documents(layouts: list[Layout], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids [T], labels [T]) of each document; about a fifth of the labels do not count, in some documents none does."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in (length for layout in layouts for length in layout.doc_lengths.values()):
        ids = torch.randint(0, 128, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < (1.0 if torch.rand((), generator=generator) < 0.2 else 0.2)
        documents.append((ids, ids.masked_fill(ignored, -100)))
    if not any((labels[1:] != -100).any() for _, labels in documents):
        ids = torch.randint(0, 128, (2,), generator=generator)  # something must be learned: a layout of its own
        layouts.append(Layout({0: (Segment(len(documents), 0, 2),)}))
        documents.append((ids, ids.clone()))
    return documents


def run_step(
    case: Case, layouts: list[Layout], documents: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """On one rank: this rank's layouts; returns the loss and every gradient, summed over ranks."""
    if "exchange" not in worker_state:
        worker_state["exchange"] = Exchange()
    exchange = worker_state["exchange"]
    model = patch_model(case.model(), kernel=case.kernel, loss_chunk_tokens=16).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    num_items = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    num_tokens = sum(len(ids) for ids, _ in documents)
    with in_order_communicators() if case.in_order else nullcontext():
        total = torch.zeros((), dtype=torch.float64)
        for layout in layouts:
            if exchange.rank not in layout.ranks:
                continue
            shard = layout.shard(exchange.rank)
            shifted = {s.doc: torch.cat([documents[s.doc][1][1:], torch.tensor([-100])]) for s in shard}
            loss = model(
                input_ids=torch.cat([documents[s.doc][0][s.start : s.stop] for s in shard])[None],
                shift_labels=torch.cat([shifted[s.doc][s.start : s.stop] for s in shard])[None],
                layout=layout,
                exchange=exchange,
                num_items_in_batch=num_items,
                num_tokens_in_batch=num_tokens,
            ).loss
            loss.backward()
            total += loss.detach()
        summed = {"loss": total}
        for name, parameter in model.named_parameters():
            summed[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for tensor in summed.values():
            dist.all_reduce(tensor)
    return summed


def run_steps(case: Case, examples: list[tuple[list[Layout], Any]]) -> list[dict[str, torch.Tensor]]:
    """Several steps, one after another, on one rank."""
    return [run_step(case, layouts, documents) for layouts, documents in examples]


def check(case: Case, pool: RankPool, examples: list[list[Layout]]) -> None:
    batch = [(layouts, make_documents(layouts, seed)) for seed, layouts in enumerate(examples)]
    by_rank = pool.run(run_steps, case, batch)
    for example, (layouts, documents) in enumerate(batch):
        model = case.model().train()
        if case.dtype == torch.bfloat16:  # the same weights, computed exactly
            model = model.float()
        loss = reference_loss(model, documents, case.stock_losses)
        loss.backward()
        expected = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}
        for rank, answers in enumerate(by_rank):
            for name, value in answers[example].items():
                reference = torch.zeros_like(value) if expected[name] is None else expected[name].to(value.dtype)
                error = float((value - reference).abs().max() / reference.abs().max().clamp_min(1e-30))
                if (
                    float(reference.abs().max()) < 1e-12
                ):  # a gradient that is zero but for rounding has no relative error
                    error = float((value - reference).abs().max())
                assert error <= case.tolerance, f"{name} on rank {rank}: {error:.1e} > {case.tolerance}; {layouts}"


def examples(world_size: int) -> st.SearchStrategy[list[list[Layout]]]:
    return st.lists(steps(world_size, max_layouts=3, heads=HEADS), min_size=EXAMPLES_A_CALL, max_size=EXAMPLES_A_CALL)


IN_ORDER = ("llama-float64-flash", "mixtral-float64")
"""Cases that also run with NCCL's in-order communicators."""
BY_NIGHT = (
    *("mistral-float32", "mistral-bfloat16", "bloom-float32", "bloom-bfloat16", "mpt-float32", "mixtral-float32"),
    *("mpt-bfloat16", "llama-stock-loss", "mixtral-float64-checkpointing", *IN_ORDER),
)
"""Cases whose model and whose dtype, loss or checkpointing other cases have, and those that run in order."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(EXACT[name], id=name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in EXACT],
)
@settings(max_examples=max(2, settings().max_examples // 50))
@given(data=st.data())
def test_any_layouts_give_the_loss_and_gradients_of_one_process(case: Case, any_ranks: RankPool, data: st.DataObject):
    check(case, any_ranks, data.draw(examples(any_ranks.world_size)))


@pytest.mark.parametrize("name", IN_ORDER)
@settings(max_examples=max(2, settings().max_examples // 50))
@given(data=st.data())
def test_the_same_with_in_order_communicators(name: str, any_ranks: RankPool, data: st.DataObject):
    check(replace(EXACT[name], in_order=True), any_ranks, data.draw(examples(any_ranks.world_size)))


PACKED = (24, 24, 24, 24)
"""Four packed documents of equal length, as in the run in which two context-parallel stacks trained one long document."""


def test_packed_documents_do_not_see_each_other(ranks2: RankPool):
    """The case on which peers are silently wrong: packed documents, context parallel over two ranks.

    They gave the loss of one long document (6.9873 where 6.9708 is right). Each document is split over both ranks here.
    """
    case = EXACT["llama-float64"]
    shards: dict[int, tuple[Segment, ...]] = {0: (), 1: ()}
    for doc, length in enumerate(PACKED):
        for rank, segments in zigzag(doc, length, (0, 1)).items():
            shards[rank] += segments
    layouts = [Layout(shards)]
    ids = torch.arange(sum(PACKED)) * 37 % 128
    documents = [(part, part) for part in ids.split(PACKED)]
    ours = float(run_on_all(ranks2, case, layouts, documents)["loss"])
    right = reference_loss(case.model(), documents, stock=False).item()
    one_long_document = reference_loss(case.model(), [(ids, ids)], stock=False).item()
    assert abs(right - one_long_document) > 1e-3 * right  # or this would show nothing
    assert abs(ours - right) <= 1e-10 * right


def run_on_all(pool: RankPool, case: Case, layouts: list[Layout], documents: list[Any]) -> dict[str, torch.Tensor]:
    """The sums, which are the same on all ranks."""
    return pool.run(run_step, case, layouts, documents)[0]
