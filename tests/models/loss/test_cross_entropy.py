"""Chunked cross-entropy against torch's, value and gradients, and what it allocates.

Tolerances: 1e-5 in float32, 1e-12 in float64; 2e-2 under bfloat16 autocast (8 bits of mantissa).
"""

import pytest
import torch
import torch.distributed as dist

from hf_longctx.models.loss.cross_entropy import VocabularySlice, chunked_cross_entropy
from tests.builders.made_tensors import LargestTensor, MadeTensors
from tests.worlds.rank_pool import RankPool

TOKENS, HIDDEN, VOCABULARY = 37, 8, 50
NOTHING, SOME = torch.full((TOKENS,), -100), torch.arange(TOKENS).masked_fill(torch.arange(TOKENS) % 3 == 0, -100)


def inputs(dtype: torch.dtype, bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if bias else [])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 10, 1024])
@pytest.mark.parametrize("labels", [SOME, NOTHING], ids=["some", "nothing"])
def test_equals_torch(dtype: torch.dtype, bias: bool, chunk: int, labels: torch.Tensor):
    leaves = inputs(dtype, bias)
    ours = chunked_cross_entropy(leaves[0], leaves[1], labels, leaves[2] if bias else None, chunk)
    right = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), labels, reduction="sum")
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours, right, **tolerance)
    scale = 0.25  # a gradient other than one comes in
    for gradient, expected in zip(
        torch.autograd.grad(scale * ours, leaves), torch.autograd.grad(scale * right, leaves)
    ):
        torch.testing.assert_close(gradient, expected, **tolerance)


@pytest.mark.parametrize("chunk", [10, 1024])
@pytest.mark.parametrize("labels", [SOME, NOTHING], ids=["some", "nothing"])
def test_rows_that_are_known_give_the_same_bits(chunk: int, labels: torch.Tensor):
    leaves = inputs(torch.float32, bias=True)
    known = torch.tensor([row for row, label in enumerate(labels.tolist()) if label != -100], dtype=torch.int64)
    loss = chunked_cross_entropy(leaves[0], leaves[1], labels, leaves[2], chunk)
    given = chunked_cross_entropy(leaves[0], leaves[1], labels, leaves[2], chunk, label_rows=known)
    assert torch.equal(loss, given)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(given, leaves)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("labels", [SOME, NOTHING], ids=["some", "nothing"])
@pytest.mark.parametrize("kind", ["float32", "float16", "autocast"])
def test_a_gradient_that_waits_for_backward_has_the_same_bits(labels: torch.Tensor, kind: str):
    leaves = inputs(torch.float16 if kind == "float16" else torch.float32, bias=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        at_once, later = (
            chunked_cross_entropy(leaves[0], leaves[1], labels, leaves[2], 10, waits=waits) for waits in (False, True)
        )
    assert torch.equal(at_once, later)
    for one, other in zip(torch.autograd.grad(0.25 * at_once, leaves), torch.autograd.grad(0.25 * later, leaves)):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype == leaves[0].dtype


def test_losses_that_wait_keep_no_gradient_of_the_head():
    """A pipeline's last stage runs many chunks of a document forward before their backwards."""
    hidden, weight = inputs(torch.float32, bias=False)
    for waits, expected in ((False, 4), (True, 0)):
        with MadeTensors() as made:
            losses = [chunked_cross_entropy(hidden, weight, SOME, chunk_tokens=2, waits=waits) for _ in range(4)]
        assert made.alive(weight) == expected
        torch.stack(losses).sum().backward()


@pytest.mark.parametrize("wrong", [[], [1], [0, 2], [1, 3]], ids=["none", "too few", "one without", "one forgotten"])
def test_rows_that_are_not_those_with_a_label_are_refused(wrong: list[int]):
    leaves = inputs(torch.float32, bias=False)
    labels = torch.full((TOKENS,), -100)
    labels[[1, 2]] = 7
    with pytest.raises(RuntimeError, match="label_rows are not the rows whose shift_labels count"):
        chunked_cross_entropy(*leaves, labels, label_rows=torch.tensor(wrong, dtype=torch.int64))


def over_ranks(vocabulary: int, chunk: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients and first row of this rank's part of the vocabulary."""
    hidden, weight, bias = inputs(torch.float64, bias=True)
    rows = -(-vocabulary // dist.get_world_size())
    first = min(dist.get_rank() * rows, vocabulary)
    part = slice(first, min(first + rows, vocabulary))
    leaves = [hidden, weight[part].detach().requires_grad_(), bias[part].detach().requires_grad_()]
    labels = SOME.where(SOME < 0, SOME % vocabulary)
    loss = chunked_cross_entropy(
        leaves[0], leaves[1], labels, leaves[2], chunk, VocabularySlice(first, dist.group.WORLD)
    )
    gradients = torch.autograd.grad(0.25 * loss, leaves)
    later = chunked_cross_entropy(
        leaves[0], leaves[1], labels, leaves[2], chunk, VocabularySlice(first, dist.group.WORLD), waits=True
    )
    assert all(map(torch.equal, gradients, torch.autograd.grad(0.25 * later, leaves)))
    return loss.detach(), [gradient.detach() for gradient in gradients], first


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 9, 3], ids=["even", "one rank with less", "one with nothing"])
@pytest.mark.parametrize("chunk", [10, 1024])
def test_a_vocabulary_over_ranks(ranks4: RankPool, vocabulary: int, chunk: int):
    hidden, weight, bias = (tensor.detach() for tensor in inputs(torch.float64, bias=True))
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight[:vocabulary].clone(), bias[:vocabulary].clone())]
    labels = SOME.where(SOME < 0, SOME % vocabulary)
    right = chunked_cross_entropy(leaves[0], leaves[1], labels, leaves[2])
    expected = torch.autograd.grad(0.25 * right, leaves)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    for loss, (of_hidden, *of_rows), first in ranks4.run(over_ranks, vocabulary, chunk):
        torch.testing.assert_close(loss, right.detach(), **exact)
        torch.testing.assert_close(of_hidden, expected[0], **exact)
        for mine, whole in zip(of_rows, expected[1:]):
            torch.testing.assert_close(mine, whole[first : first + len(mine)], **exact)


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    leaves = inputs(torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked_cross_entropy(*leaves, SOME)
    right = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), SOME, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=0)
    for gradient, expected in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(right, leaves)):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() <= 2e-2 * expected.norm()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = inputs(torch.float32, bias=False)
    loss = chunked_cross_entropy(hidden, weight.detach(), SOME)
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, SOME).requires_grad


def test_logits_of_all_tokens_never_exist():
    tokens, hidden_size, vocabulary, chunk = 512, 4, 300, 32
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as plain:
        torch.nn.functional.cross_entropy(hidden @ weight.t(), labels).backward()
    with LargestTensor() as ours:
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk).backward()
    assert plain.elements == tokens * vocabulary  # the counter sees them where they exist
    assert ours.elements == chunk * vocabulary
