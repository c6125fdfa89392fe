"""Token accuracy and entropy against plain logits: of chunks, of a vocabulary over ranks, and what a trainer logs.

Plain transformers runs each document alone. Tolerance: 1e-6 in float32 and float64 alike; means over hundreds of tokens.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_longctx.models.loss.cross_entropy import VocabularySlice, chunked_cross_entropy
from hf_longctx.models.loss.token_metrics import PIECE_ROWS, TokenMetrics, means
from tests.builders.made_tensors import LargestTensor
from tests.builders.training_runs import ANY_MODELS, Rows, documents, train
from tests.worlds.rank_pool import RankPool

NAMES = ("mean_token_accuracy", "entropy")
CPU = torch.device("cpu")
LENGTHS = [3, 150, 17, 300, 2, 9, 257, 40, 8, 411, 90, 26]
PLUGIN = {"capacity": 400, "global_batch_documents": 6, "token_metrics": True}
SETTINGS = {"max_steps": 2, "learning_rate": 0.0, "logging_steps": 2, "eval_strategy": "no"}
TOLERANCE = {"rel": 1e-6, "abs": 1e-6}
SOME = torch.arange(37).masked_fill(torch.arange(37) % 3 == 0, -100)
"""Labels of 37 tokens, of which a third has none."""


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states [37, 8], weight [50, 8] and bias [50] of a head that predicts some of the labels right."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((37, 8), (50, 8), (50,)))
    hidden[1::5] = 3 * weight[1:37:5]
    return [tensor.requires_grad_() for tensor in (hidden, weight, bias)]


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[int, float, int]:
    """Right predictions, entropies in nats and label tokens, from all logits [T, V] at once, in float64."""
    logits, labels = logits.double()[labels != -100], labels[labels != -100]
    logs = logits.log_softmax(-1)
    return int((logits.argmax(-1) == labels).sum()), float(-(logs.exp() * logs).sum()), len(labels)


def plain(model: Any, rows: Rows) -> dict[str, float]:
    """The metrics of some documents, each alone, by plain transformers."""
    sums = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
        sums.append(of_logits(logits, torch.tensor(row.get("labels", row["input_ids"])[1:])))
    right, entropies, tokens = map(sum, zip(*sums))
    return dict(zip(NAMES, (right / tokens, entropies / tokens)))


@pytest.mark.parametrize("chunk", [1, 10, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_give_what_all_logits_give_and_leave_the_loss_as_it_is(dtype: torch.dtype, chunk: int):
    hidden, weight, bias = inputs(dtype)
    metrics = TokenMetrics(CPU)
    loss = chunked_cross_entropy(hidden, weight, SOME, bias, chunk, observe_logits=metrics.observe)
    assert torch.equal(loss, chunked_cross_entropy(hidden, weight, SOME, bias, chunk))
    expected = of_logits(torch.nn.functional.linear(hidden, weight, bias).detach(), SOME)
    assert 0 < expected[0] < expected[2]
    assert metrics.take().tolist() == pytest.approx(expected, **TOLERANCE)
    assert not metrics.take().any(), "taken once"


def test_a_token_that_cannot_come_has_no_entropy_and_ties_go_to_the_first():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 3.0, 3.0]])
    metrics = TokenMetrics(CPU)
    metrics.observe(logits, torch.tensor([0, 2]), logits.logsumexp(-1, keepdim=True))
    right, entropies, tokens = metrics.take().tolist()
    own = torch.distributions.Categorical(logits=logits[1]).entropy()
    assert (right, tokens) == (1, 2)
    assert entropies == pytest.approx(torch.tensor(2.0).log() + own)


def test_no_label_and_logits_that_are_not_finite_are_no_metrics():
    assert means(torch.zeros(3)) == {}
    assert means(torch.tensor([1.0, torch.nan, 2.0])) == {}


def test_no_second_chunk_exists():
    """The largest tensor that counting makes is a piece of the chunk."""
    tokens, vocabulary = 4 * PIECE_ROWS, 300
    logits = torch.randn(tokens, vocabulary)
    normalizer, metrics = logits.logsumexp(-1, keepdim=True), TokenMetrics(CPU)
    with LargestTensor() as largest:
        metrics.observe(logits, torch.zeros(tokens, dtype=torch.int64), normalizer)
    assert largest.elements == PIECE_ROWS * vocabulary


def over_ranks(vocabulary: int) -> list[float]:
    """Sums of this rank, which holds a part of the vocabulary."""
    hidden, weight, bias = (tensor.detach() for tensor in inputs(torch.float64))
    rows = -(-vocabulary // dist.get_world_size())
    first = min(dist.get_rank() * rows, vocabulary)
    part, metrics = slice(first, min(first + rows, vocabulary)), TokenMetrics(CPU)
    labels = SOME.where(SOME < 0, SOME % vocabulary)
    slices = VocabularySlice(first, dist.group.WORLD)
    chunked_cross_entropy(hidden, weight[part], labels, bias[part], 10, slices, observe_logits=metrics.observe)
    return metrics.take().tolist()


@pytest.mark.parametrize("vocabulary", [50, 3], ids=["even", "one with nothing"])
def test_a_vocabulary_over_ranks(ranks4: RankPool, vocabulary: int):
    hidden, weight, bias = (tensor.detach() for tensor in inputs(torch.float64))
    logits = torch.nn.functional.linear(hidden, weight[:vocabulary], bias[:vocabulary])
    expected = of_logits(logits, SOME.where(SOME < 0, SOME % vocabulary))
    for sums in ranks4.run(over_ranks, vocabulary):
        assert sums == pytest.approx(expected, **TOLERANCE)


def check(run: Any, model: str, rows: Rows, eval_rows: Rows) -> None:
    """Compare what a run logs of training and evaluation with plain logits."""
    fresh = ANY_MODELS[model]().eval()
    [entry] = [entry for entry in run.log if "loss" in entry]
    expected, evaluated = plain(fresh, rows), plain(fresh, eval_rows)
    assert expected[NAMES[0]] > 0
    assert {name: entry[name] for name in NAMES} == pytest.approx(expected, **TOLERANCE)
    assert {name: run.evaluation[f"eval_{name}"] for name in NAMES} == pytest.approx(evaluated, **TOLERANCE)


# llama: logits are the head's; gemma2: the class's own, in chunks that are computed again in backward
@pytest.mark.parametrize("model", ["llama", "gemma2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_logs_what_plain_logits_give(model: str, ranks: int, ranks2: RankPool, tmp_path: Any):
    """Two steps of six documents, packed and, on two ranks, split; a third of the tokens has no label."""
    rows, eval_rows = documents(LENGTHS, labels=True), documents([5, 120, 33], seed=1)
    call = partial(train, eval_rows=eval_rows)
    settings = SETTINGS | {"output_dir": tmp_path}
    plugin = PLUGIN | {"capacity": 700 if ranks == 1 else 220}
    runs = [call(model, rows, plugin, settings)] if ranks == 1 else ranks2.run(call, model, rows, plugin, settings)
    for run in runs:
        check(run, model, rows, eval_rows)
    if ranks == 2:
        assert any(entry.get("split_documents") for entry in runs[0].log)


@pytest.mark.parametrize("how", [{"pipeline_stages": 2}, {"sharding": "zero3"}], ids=["stages", "zero3"])
def test_stages_and_shards_log_the_same(how: dict[str, Any], ranks2: RankPool, tmp_path: Any):
    rows, eval_rows = documents(LENGTHS, labels=True), documents([5, 120, 33], seed=1)
    settings = SETTINGS | {"output_dir": tmp_path}
    for run in ranks2.run(
        partial(train, eval_rows=eval_rows), "llama", rows, PLUGIN | {"capacity": 700} | how, settings
    ):
        check(run, "llama", rows, eval_rows)


def test_gradient_accumulation_counts_every_document_once(tmp_path: Any):
    rows = documents(LENGTHS, labels=True)
    plugin = {"capacity": 700, "token_metrics": True}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    run = train("llama", rows, plugin, SETTINGS | batches | {"output_dir": tmp_path}, eval_rows=rows[:3])
    check(run, "llama", rows, rows[:3])


def test_it_is_off_unless_asked_for(tmp_path: Any):
    rows = documents(LENGTHS[:3])
    settings = SETTINGS | {"output_dir": tmp_path, "max_steps": 1, "logging_steps": 1}
    run = train("llama", rows, {"capacity": 700, "global_batch_documents": 3}, settings, eval_rows=rows)
    assert not {name for entry in [*run.log, run.evaluation] for name in entry if name.endswith(NAMES)}
