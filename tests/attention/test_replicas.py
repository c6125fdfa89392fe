"""Models copied to virtual ranks: they share weights, and train and score as one process does.

Models are compared with plain transformers on each document alone: 1e-10 of a parameter's largest gradient.
"""

import functools
import itertools
import threading
from typing import Any

import pytest
import torch

from hf_longctx import patch_model, prefill, score
from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.replicas import add_gradients, replicate
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.layouts.layout import Layout
from tests.builders.plain_reference import reference_loss
from tests.builders.plans.packed_layouts import PACKED, WHOLE
from tests.builders.tiny_models import FAMILIES, tiny_general


def documents_of(layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids [T], labels [T]) of each document."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 128, (length,), generator=generator) for length in layout.doc_lengths.values()]
    return [
        (document, document.masked_fill(torch.rand(len(document), generator=generator) < 0.2, -100)) for document in ids
    ]


def loss_of(model: Any, layout: Layout, exchange: Exchange, documents: Any) -> torch.Tensor:
    """This rank's part of the loss of one step."""
    shard = layout.shard(exchange.rank)
    following = {s.doc: torch.cat([documents[s.doc][1][1:], torch.tensor([-100])]) for s in shard}
    return model(
        input_ids=torch.cat([documents[s.doc][0][s.start : s.stop] for s in shard])[None],
        shift_labels=torch.cat([following[s.doc][s.start : s.stop] for s in shard])[None],
        layout=layout,
        exchange=exchange,
        num_items_in_batch=sum(int((labels[1:] != -100).sum()) for _, labels in documents),
        num_tokens_in_batch=sum(len(ids) for ids, _ in documents),
    ).loss


def in_another_thread(loss: torch.Tensor) -> None:
    """Backward where CUDA has it: in a thread without this one's context variables."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    # Reentrant checkpointing cuts the router's logits off from their graph, on any number of ranks.
    [
        *itertools.product(("llama", "qwen3", "qwen3_next"), ("non-reentrant", "reentrant")),
        *(("llama", "plain"), ("mixtral", "plain"), ("mixtral", "non-reentrant")),
    ],
)
def test_models_on_two_ranks_equal_plain_documents(family: str, checkpointing: str):
    """Llama, and Mixtral with its router loss, as our classes; Qwen3 by its masks, and Qwen3-Next with states. Layers are
    recomputed, and backward runs in another thread, as it does on CUDA: no context variable says there what ran."""
    layout = WHOLE if family == "qwen3_next" else PACKED[2]
    documents = documents_of(layout)
    make = FAMILIES.get(family) or functools.partial(tiny_general, family)
    plain = make(torch.float64)
    plain.set_attn_implementation("sdpa")  # eager attention has its softmax in float32
    right = reference_loss(plain, documents, stock=False)
    right.backward()
    model = patch_model(make(torch.float64)).train()
    if CHECKPOINTING[checkpointing] is not None:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
        model.enable_input_require_grads()  # reentrant checkpointing begins with a tensor that learns
    copies = replicate(model, 2)

    def step(exchange: Exchange) -> torch.Tensor:
        loss = loss_of(copies[exchange.rank], layout, exchange, documents)
        loss.backward() if checkpointing == "plain" else in_another_thread(loss)
        return loss.detach()

    loss = sum(run_on_virtual_ranks(2, step))
    add_gradients(model, copies)
    rounding = 1e-7 if family == "qwen3_next" else 1e-10  # its states are float32
    assert abs(float(loss - right.detach())) <= 1e-2 * rounding * float(right.detach())
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert float(error) <= rounding, f"{name}: {float(error):.1e}"


def test_replicas_share_weights_and_nothing_else():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.append(torch.nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copies = replicate(model, 2)
    for rank, replica in enumerate(copies):
        assert replica[2].weight is replica[0].weight
        assert replica[0].weight.data_ptr() == model[0].weight.data_ptr()
        replica(torch.full((3, 2), float(rank + 1))).sum().backward()
        replica[0].weight.grad = torch.full((2, 2), float(rank + 1))
    assert float(model[1].num_batches_tracked) == 0
    assert float(copies[0][1].num_batches_tracked) == 1
    model[0].weight.grad = torch.ones(2, 2)
    add_gradients(model, copies)
    assert model[0].weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert model[0].bias.grad is None
    assert copies[0][0].weight.grad is None


def test_parameters_whose_memory_cannot_be_shared_are_refused():
    class Quantised(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Quantised(torch.ones(2, 2))
    with pytest.raises(ValueError, match="weight is a Quantised, whose memory copies cannot share"):
        replicate(model, 2)


def test_scores_and_a_prompt_over_ranks():
    """Return what else takes an exchange: log-probabilities and a cache equal those of one process."""
    model = patch_model(FAMILIES["llama"](torch.float64))
    documents = [ids for ids, _ in documents_of(PACKED[2])]

    def run(exchange: Exchange | None) -> tuple[Any, Any]:
        logits, _ = prefill(model, documents[0], exchange=exchange)
        return score(model, documents, exchange=exchange, capacity=32 if exchange else None), logits

    alone = run(None)
    for scores, logits in run_on_virtual_ranks(2, run):
        for ours, right in zip(scores, alone[0], strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logits, alone[1], rtol=1e-10, atol=1e-10)
