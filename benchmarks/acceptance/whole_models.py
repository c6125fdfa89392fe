"""Whole models in bfloat16 on the device, patched, beside plain transformers in float32 on the CPU, each document alone.

Errors are of the loss, and of all gradients together: |g - g32| / |g32|. Half precision has an error of its own, which plain
transformers in bfloat16 on the CPU shows on the same documents; ours may be TOLERANCE times as large.

    one document      whole, and zigzag over 2 and 4 virtual ranks
    ones              documents of 1 token among others: they have no label, and take part
    thousands         so many documents that their boundaries take more than 64 KiB
    window            the same under a sliding window

Each with head dimensions that kernels treat differently. The reference computes documents of equal length in one batch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from acceptance.record import Bench
from hf_longctx import Layout, Segment, patch_model
from hf_longctx.attention.replicas import add_gradients, replicate
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.layouts.layout import zigzag

TOLERANCE = 2.0
"""Times the error of plain transformers in bfloat16: kernels add up in another order, and merge parts in float32."""
HEADS, KV_HEADS, LAYERS, VOCABULARY = 4, 2, 2, 512
HEAD_DIMS = (64, 96, 128, 256)
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """Documents, over so many ranks, through one model."""

    name: str
    head_dim: int
    lengths: tuple[int, ...]
    ranks: int = 1
    window: int | None = None


def cases(tiny: bool) -> list[Case]:
    """Every head dimension on a mixture, and every kind of layout on one of them."""
    one, many = (96, 40) if tiny else (3000, 20000)
    mixture = (1, one // 2, 1, 7, one // 4, 1)
    if tiny:
        chosen = [Case("ones", 64, mixture), Case("one document", 64, (one,), 2), Case("thousands", 64, (3,) * many)]
        return [*chosen, Case("window", 64, (one,), 2, window=one // 8)]
    chosen = [Case("ones", head_dim, mixture) for head_dim in HEAD_DIMS]
    chosen += [Case("one document", 128, (one,), ranks) for ranks in (1, 2, 4)]
    chosen += [Case("one document", head_dim, (one,), 2) for head_dim in (64, 256)]
    chosen.append(Case("thousands", 64, (3,) * many))
    return [*chosen, Case("window", 128, (one, 5), window=one // 8), Case("window", 128, (one,), 2, window=one // 8)]


def measure(bench: Bench) -> None:
    """Compare case by case, as long as there is time.

    Raises:
        RuntimeError: an error is larger than TOLERANCE times that of plain transformers.
    """
    worst = 0.0
    for case in cases(bench.tiny):
        if bench.left() < 0:
            bench.note(
                f"The time was used up before {case.name}, head dimension {case.head_dim}, {case.ranks} rank(s)."
            )
            break
        loss, gradient, plain_loss, plain_gradient = compared(case, bench.device)
        ratio = gradient / plain_gradient
        worst = max(worst, ratio)
        row = {
            "documents": case.name,
            "number": str(len(case.lengths)),
            "tokens": str(sum(case.lengths)),
            "head dimension": str(case.head_dim),
            "ranks": f"{case.ranks} virtual" if case.ranks > 1 else "1",
            "error of the loss": f"{loss:.1e}",
            "of gradients": f"{gradient:.1e}",
            "plain bfloat16's": f"{plain_loss:.1e}, {plain_gradient:.1e}",
            "gradients, over plain": f"{ratio:.2f}",
        }
        bench.table("Errors", [row], {"models/worst error of gradients over plain bfloat16's": worst})
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"gradients are {worst:.2f} times as wrong as plain transformers' in bfloat16; {TOLERANCE:g} may be"
        )


def compared(case: Case, device: torch.device) -> tuple[float, float, float, float]:
    """Errors of the loss and of gradients against float32: ours, and plain transformers' in bfloat16 on the CPU."""
    model = made(case)
    documents = drawn(case.lengths)
    exact = of_plain(copy.deepcopy(model), documents)
    half = of_plain(copy.deepcopy(model).to(torch.bfloat16), documents)
    ours = of_ours(model.to(torch.bfloat16).to(device), documents, case.ranks, device)
    return *errors(ours, exact), *errors(half, exact)


def made(case: Case) -> Any:
    """A small model whose weights bfloat16 holds exactly, in float32 on the CPU."""
    config_class = LlamaConfig if case.window is None else MistralConfig
    more: dict[str, Any] = {} if case.window is None else {"sliding_window": case.window}
    config = config_class(
        hidden_size=HEADS * case.head_dim,
        head_dim=case.head_dim,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=2 * HEADS * case.head_dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=2**16,
        **more,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16).to(torch.float32).train()


def drawn(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Token ids of each document."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


Result = tuple[float, torch.Tensor]
"""Loss, and all gradients end to end, float32 on the CPU."""


def of_plain(model: Any, documents: list[torch.Tensor]) -> Result:
    """Plain transformers, each document alone; those of one length in one batch."""
    by_length: dict[int, list[torch.Tensor]] = defaultdict(list)
    for ids in documents:
        by_length[len(ids)].append(ids)
    labels = sum(len(ids) - 1 for ids in documents)
    total = 0.0
    for length, same in by_length.items():
        if length == 1:
            continue  # no token of it is predicted, and nothing else sees it
        ids = torch.stack(same)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / labels
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


def of_ours(model: Any, documents: list[torch.Tensor], ranks: int, device: torch.device) -> Result:
    """The patched model on the device, over a layout."""
    patch_model(model)
    if ranks == 1:
        layout = Layout({0: tuple(Segment(doc, 0, len(ids)) for doc, ids in enumerate(documents))})
        loss = _rank_loss(model, layout, None, documents, device)
        loss.backward()
        return float(loss.detach()), gradients_of(model)
    layout = Layout(zigzag(0, len(documents[0]), range(ranks)))
    copies = replicate(model, ranks)

    def step(exchange: Any) -> torch.Tensor:
        loss = _rank_loss(copies[exchange.rank], layout, exchange, documents, device)
        loss.backward()
        return loss.detach()

    losses = run_on_virtual_ranks(ranks, step, device=device)
    add_gradients(model, copies)
    return float(sum(losses)), gradients_of(model)


def _rank_loss(
    model: Any, layout: Layout, exchange: Any, documents: list[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """One rank's part of the loss."""
    shard = layout.shard(0 if exchange is None else exchange.rank)
    following = {s.doc: torch.cat([documents[s.doc][1:], torch.tensor([IGNORED])]) for s in shard}
    return model(
        input_ids=torch.cat([documents[s.doc][s.start : s.stop] for s in shard])[None].to(device),
        shift_labels=torch.cat([following[s.doc][s.start : s.stop] for s in shard])[None].to(device),
        layout=layout,
        exchange=exchange,
        num_items_in_batch=sum(len(ids) - 1 for ids in documents),
    ).loss


def gradients_of(model: Any) -> torch.Tensor:
    """All gradients end to end, float32 on the CPU."""
    return torch.cat(
        [parameter.grad.flatten().float().cpu() for parameter in model.parameters() if parameter.grad is not None]
    )


def errors(result: Result, exact: Result) -> tuple[float, float]:
    """Relative errors of the loss and of gradients."""
    return abs(result[0] / exact[0] - 1), float((result[1] - exact[1]).norm() / exact[1].norm())
