"""Documents longer than all ranks hold: refused, truncated, split or dropped as the policy says, counted, and trained on
exactly as a data set cut by hand."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_callback import TrainerState

from hf_longctx import LengthAwareCollator, LongContextPlugin, LongContextTrainer
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedSteps
from hf_longctx.data.long_documents import Cuts, Pieces, cut_documents, read_piece
from hf_longctx.planner import CPU_CORE, CostModel, GlobalBatches, PlanError, Topology
from hf_longctx.planner.cost.adjustment import Adjustment
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import (
    Rows,
    Run,
    arguments,
    assembled,
    documents,
    fresh_accelerator_state,
    reference,
    train,
)
from tests.worlds.rank_pool import RankPool

COST = CostModel.from_config(tiny_llama().config, CPU_CORE)
LENGTHS = [30, 250, 17, 120, 6, 100, 201, 44, 101, 9]
LIMIT = 100
POLICIES = ("truncate", "split", "drop")
CUTS = [("truncate", 0), ("drop", 0), *(("split", overlap) for overlap in (0, 1, 30, LIMIT - 1))]
"""Policies and overlaps."""


def by_hand(rows: Rows, policy: str, limit: int, overlap: int = 0) -> Rows:
    """The data set that a person would have cut: the beginnings, the pieces, or the documents that are short, in order."""
    pieces = []
    for row in rows:
        length = len(row["input_ids"])
        if policy == "drop" and length > limit:
            continue
        pieces.append({name: values[:limit] for name, values in row.items()})
        start = 0
        while policy == "split" and start + limit < length:
            start += limit - overlap
            piece = {name: values[start : start + limit] for name, values in row.items()}
            if overlap:
                piece["labels"] = [-100] * overlap + piece.get("labels", piece["input_ids"])[overlap:]
            pieces.append(piece)
    return pieces


def forms(rows: Rows) -> dict[str, Any]:
    """The same documents in the forms in which data sets come."""
    order = np.random.default_rng(1).permutation(len(rows))
    shuffled = Dataset.from_list([rows[i] for i in order])
    return {
        "list": rows,
        "table": Dataset.from_list(rows),
        "two tables": concatenate_datasets([Dataset.from_list(rows[:3]), Dataset.from_list(rows[3:])]),
        "selection": shuffled.select(np.argsort(order)),
        "transform": Dataset.from_list(rows).with_transform(lambda batch: dict(batch)),
    }


def cut(dataset: Any, policy: str, limit: int | None, overlap: int = 0) -> Pieces:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cut_documents(dataset, LengthIndex.from_dataset(dataset), policy, limit, overlap)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(("policy", "overlap"), CUTS)
@pytest.mark.parametrize("form", forms(documents([1] * 4)))
def test_pieces_are_what_a_person_would_have_cut(form: str, policy: str, overlap: int, labels: bool):
    rows = documents([*LENGTHS, 3, 1, 0, 200], labels=labels)
    dataset = forms(rows)[form]
    pieces = cut(dataset, policy, LIMIT, overlap)
    hand = by_hand(rows, policy, LIMIT, overlap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = LengthIndex.from_dataset(hand)
    np.testing.assert_array_equal(pieces.lengths, index.lengths[index.usable])
    np.testing.assert_array_equal(pieces.label_tokens, index.label_tokens[index.usable])
    for piece, row in enumerate(index.usable):
        read = {name: np.asarray(values).tolist() for name, values in read_piece(dataset, pieces, piece).items()}
        assert read == hand[row]


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12),
    policy=st.sampled_from(POLICIES),
    limit=st.integers(2, 70),
    overlap=st.integers(0, 69),
)
def test_every_token_is_in_one_piece_or_counted(lengths: list[int], policy: str, limit: int, overlap: int):
    overlap = overlap % limit if policy == "split" else 0
    rows = documents([*lengths, 2])
    pieces = cut(rows, policy, limit, overlap)
    assert pieces.lengths.max() <= limit
    long = [length for length in lengths if length > limit]
    part = np.array([pieces.is_part(piece) for piece in range(len(pieces))])
    assert (pieces.cuts.documents, pieces.cuts.pieces) == (len(long), part.sum())
    tokens, learned = [], []
    for piece, (document, start, length) in enumerate(zip(pieces.document, pieces.start, pieces.lengths)):
        read = read_piece(rows, pieces, piece)
        assert list(read["input_ids"]) == rows[document]["input_ids"][start : start + length]
        tokens += [(document, start + i) for i in range(length)]
        labels = read.get("labels", read["input_ids"])
        learned += [(document, start + i) for i in range(1, length) if labels[i] != -100]
    assert len(learned) == len(set(learned)) == pieces.label_tokens.sum()  # no label twice
    assert len(learned) == sum(lengths) + 2 - len(rows) - pieces.cuts.labels
    assert len(set(tokens)) == sum(lengths) + 2 - pieces.cuts.tokens
    assert len(tokens) == len(set(tokens)) + pieces.cuts.repeated
    expected = {
        "truncate": Cuts(len(long), len(long), *(sum(long) - limit * len(long),) * 2),
        "drop": Cuts(len(long), 0, sum(long), sum(long) - len(long)),
    }
    if policy in expected:
        assert pieces.cuts == expected[policy]
    elif overlap:
        assert pieces.cuts.tokens == pieces.cuts.labels == 0
    else:
        assert pieces.cuts.tokens == sum(
            length % limit == 1 for length in long
        )  # a last piece of one token predicts nothing
        assert pieces.cuts.labels == sum(-(-length // limit) - 1 for length in long)
        assert pieces.cuts.repeated == 0


@pytest.mark.parametrize(
    ("policy", "overlap", "message"),
    [
        ("truncate", 0, r"truncated to their first 100 tokens\. Not trained on: 151 tokens and 151 labels$"),
        (
            "split",
            0,
            r"split into pieces of at most 100 tokens, 4 documents of their own\. Not trained on: 1 tokens and 3 labels, 1 "
            r"pieces among them that have no label left$",
        ),
        (
            "split",
            10,
            r"split into pieces of at most 100 tokens, 5 documents of their own, in which 30 tokens stand again as context "
            r"only\. Not trained on: 0 tokens and 0 labels$",
        ),
        ("drop", 0, r"dropped\. Not trained on: 351 tokens and 349 labels$"),
    ],
)
def test_one_warning_counts_what_is_lost(policy: str, overlap: int, message: str):
    rows = documents([5, 250, 101])
    index = LengthIndex.from_dataset(rows)
    begins = r"^2 of 3 documents are longer than 100 tokens \(longest_document\) and are "
    with pytest.warns(UserWarning, match=begins + message) as caught:
        cut_documents(rows, index, policy, 100, overlap)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cut_documents(rows, index, policy, 250, overlap).cuts == Cuts()


def test_a_piece_without_labels_is_left_out_and_counted():
    rows = [{"input_ids": list(range(7)), "labels": [-100] * 5 + [5, 6]}, {"input_ids": [1, 2, 3]}]
    rows[1]["labels"] = [1, 2, 3]
    assert cut(rows, "truncate", 4).document.tolist() == [1]
    assert cut(rows, "truncate", 4).cuts == Cuts(documents=1, pieces=0, tokens=7, labels=2)
    split = cut(rows, "split", 4)
    assert (split.document.tolist(), split.start.tolist(), split.label_tokens.tolist()) == ([0, 1], [4, 0], [2, 2])
    assert split.cuts == Cuts(documents=1, pieces=1, tokens=4, labels=0)
    overlapping = cut(rows, "split", 4, 2)  # tokens 0-3, 2-5 and 4-6; labels 5 and 6 are learned
    assert (overlapping.start.tolist(), overlapping.label_tokens.tolist()) == ([2, 4, 0], [1, 1, 2])
    assert overlapping.cuts == Cuts(documents=1, pieces=2, tokens=2, labels=0, repeated=2)
    for piece, labels in enumerate(([-100, -100, -100, 5], [-100, -100, 6])):
        assert read_piece(rows, overlapping, piece)["labels"].tolist() == labels
    with pytest.raises(
        ValueError, match=r"none of the 1 documents .* 1 pieces of at most 4 tokens .* Valid: a larger longest_document"
    ):
        cut(rows[:1], "truncate", 4)
    with pytest.raises(
        ValueError, match=r"none of the 1 documents .* all are longer than 4 tokens .* and dropped\. Valid: "
    ):
        cut(rows[:1], "drop", 4)


def test_only_the_piece_is_read():
    rows = documents([10, 5000], labels=True)
    dataset = Dataset.from_list(rows).with_format("torch")
    pieces = cut(dataset, "split", 64)
    overlapping = cut(dataset, "split", 64, 16)
    assert len(read_piece(dataset, overlapping, 5)["labels"]) == 64
    whole = dataset.data.column("input_ids").chunk(0).values.to_numpy()
    for piece in (1, 2, len(pieces) - 1):
        tokens = read_piece(dataset, pieces, piece)["input_ids"]
        assert np.shares_memory(tokens, whole)
        assert len(tokens) == pieces.lengths[piece] <= 64


def test_the_default_refuses_and_names_the_other_policies():
    rows = documents([5, 401, 20])
    index = LengthIndex.from_dataset(rows)
    other = (
        r"long_documents='truncate' \(its first {0} tokens are kept\), long_documents='split' \({1} pieces, each a document "
        r"of its own\) or long_documents='drop' \(it is left out\)$"
    )
    with pytest.raises(
        PlanError,
        match=r"^document 1 has 401 tokens, more than longest_document=150\. Valid: longest_document >= 401, "
        "a shorter document, or " + other.format(150, 3),
    ):
        cut_documents(rows, index, "error", 150)
    pieces, collator = cut_documents(rows, index), LengthAwareCollator(Topology(4, 100), COST)
    with pytest.raises(
        PlanError,
        match=r"^document 1 has 401 tokens, but all ranks together hold 4 ranks \* 100 tokens \(capacity\) = 400\. Valid: "
        r"capacity >= 101, or >= 5 ranks, or a shorter document, or " + other.format(400, 2),
    ):
        PlannedSteps(rows, pieces, GlobalBatches(pieces.lengths, 0, tokens=500), collator)


def test_a_document_that_changes_its_length_is_named():
    rows = documents([5, 250])
    pieces = cut(rows, "split", 100)
    rows[1]["input_ids"] = rows[1]["input_ids"][:240]
    with pytest.raises(ValueError, match=r"document 1 had 250 tokens when lengths were read, .* 240 input_ids"):
        read_piece(rows, pieces, 2)


@pytest.mark.parametrize(
    ("policy", "limit", "overlap", "message"),
    [
        ("split", 4, -1, r"overlap_tokens=-1 must be at least 0 and less than longest_document=4"),
        ("split", 4, 4, r"overlap_tokens=4 must be at least 0 and less than longest_document=4"),
        (
            "truncate",
            4,
            2,
            r"overlap_tokens=2 needs long_documents='split', got 'truncate'; valid with it: overlap_tokens=0",
        ),
        ("drop", None, 1, r"overlap_tokens=1 needs long_documents='split'"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(policy: str, limit: int | None, overlap: int, message: str):
    rows = documents([5, 9])
    with pytest.raises(ValueError, match=message):
        cut_documents(rows, LengthIndex.from_dataset(rows), policy, limit, overlap)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize(("policy", "overlap"), CUTS)
def test_steps_are_those_of_a_data_set_cut_by_hand(policy: str, overlap: int, labels: bool):
    """Every tensor of every step, on each of 3 ranks."""
    rows = documents(LENGTHS, labels=labels)
    hand = by_hand(rows, policy, LIMIT, overlap)
    both: list[tuple[Any, Pieces]] = [
        (Dataset.from_list(rows), cut(rows, policy, LIMIT, overlap)),
        (hand, cut(hand, "error", None)),
    ]
    for rank in range(3):
        collator = LengthAwareCollator(Topology(3, LIMIT // 3 + 1), COST, rank)
        ours, theirs = (
            PlannedSteps(dataset, pieces, GlobalBatches(pieces.lengths, 0, tokens=180), collator)
            for dataset, pieces in both
        )
        assert ours.steps(0) == theirs.steps(0) > 1
        for step in range(ours.steps(0)):
            one, other = (steps.prepare(0, step, Adjustment()) for steps in (ours, theirs))
            assert (one.num_items, one.num_tokens) == (other.num_items, other.num_tokens)
            assert len(one.micro_batches) == len(other.micro_batches)
            for a, b in zip(one.micro_batches, other.micro_batches):
                assert a.layout == b.layout
                torch.testing.assert_close((a.input_ids, a.shift_labels), (b.input_ids, b.shift_labels), rtol=0, atol=0)


def test_wrong_settings_are_refused_and_the_environment_is_read(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="long_documents: must be 'error', 'truncate', 'split' or 'drop', got 'cut'"):
        LongContextPlugin(capacity=8, long_documents="cut")
    with pytest.raises(ValueError, match="longest_document: must be greater than 1, got 1"):
        LongContextPlugin(capacity=8, longest_document=1)
    with pytest.raises(ValueError, match="longest_document: must be greater than 1, got 0"):
        LongContextPlugin(capacity=8, longest_document=0)
    monkeypatch.setenv("HF_LONGCTX_LONG_DOCUMENTS", "split")
    monkeypatch.setenv("HF_LONGCTX_LONGEST_DOCUMENT", "4096")
    plugin = LongContextPlugin(capacity=8)
    assert (plugin.long_documents, plugin.longest_document) == ("split", 4096)


# Training

ROWS = documents(LENGTHS, labels=True)
SETTINGS: dict[str, Any] = {"num_train_epochs": 2}
BATCH = {"global_batch_tokens": 180}


def run_on(pool: RankPool | None, output_dir: Path, plugin: dict[str, Any], rows: Rows = ROWS, **kwargs: Any) -> Run:
    """Return what the first rank saw, its `held` replaced by the documents of each step."""
    settings = SETTINGS | {"output_dir": output_dir} | kwargs.pop("settings", {})
    given = ("llama", rows, BATCH | plugin, settings)
    runs = [train(*given, **kwargs)] if pool is None else pool.run(train, *given, **kwargs)
    runs[0].held = [assembled(parts) for parts in zip(*(run.held for run in runs), strict=True)]  # type: ignore[misc]
    return runs[0]


def assert_same(run: Run, other: Run, tolerance: float, after: int = 0) -> None:
    assert run.held == other.held[after:]
    np.testing.assert_allclose(run.series("loss"), other.series("loss"), rtol=tolerance)
    np.testing.assert_allclose(run.series("eval_loss"), other.series("eval_loss"), rtol=tolerance)
    torch.testing.assert_close(run.weights, other.weights, rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.* documents are:UserWarning")
@pytest.mark.parametrize(
    ("policy", "overlap"),
    [("truncate", 0), pytest.param("split", 0, marks=pytest.mark.nightly), ("split", 30), ("drop", 0)],
)
def test_training_is_that_on_a_data_set_cut_by_hand(policy: str, overlap: int, ranks2: RankPool, tmp_path: Path):
    """On two ranks, which hold 100 tokens together, against one process that holds them alone, and against a loop over
    documents with plain transformers."""
    hand = by_hand(ROWS, policy, LIMIT, overlap)
    plugin = {"capacity": LIMIT // 2, "long_documents": policy, "overlap_tokens": overlap}
    evaluation = {"settings": {"eval_strategy": "epoch"}}
    cut_here = run_on(ranks2, tmp_path / "two", plugin, eval_rows=ROWS, **evaluation)
    cut_by_hand = run_on(None, tmp_path / "one", {"capacity": LIMIT}, hand, eval_rows=hand, **evaluation)
    assert_same(cut_here, cut_by_hand, tolerance=1e-5)
    assert len(cut_here.series("eval_loss")) == 2

    index = LengthIndex.from_dataset(hand)
    usable = [hand[i] for i in index.usable]
    batches = GlobalBatches(index.lengths[index.usable], seed=3, tokens=180)
    losses, _, weights = reference("llama", usable, batches, 2, SETTINGS | {"output_dir": tmp_path})
    np.testing.assert_allclose(cut_here.series("loss"), losses, rtol=1e-5)
    torch.testing.assert_close(cut_here.weights, weights, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def split_on_two(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A whole run on two ranks that hold 100 tokens together, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("split")
    settings = {"save_strategy": "steps", "save_steps": 1}
    return folder, run_on(ranks2, folder, {"capacity": 50, "long_documents": "split"}, settings=settings)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.* documents are:UserWarning")
@pytest.mark.parametrize(
    ("world_size", "capacity"), [pytest.param(1, 100, marks=pytest.mark.nightly), (1, 400), (4, 60)]
)
def test_a_resumed_run_cuts_where_the_first_launch_did(
    world_size: int, capacity: int, split_on_two: tuple[Path, Run], request: pytest.FixtureRequest, tmp_path: Path
):
    folder, whole = split_on_two
    assert len(whole.held) > 8
    pool = None if world_size == 1 else request.getfixturevalue(f"ranks{world_size}")
    plugin = {"capacity": capacity, "long_documents": "split"}
    resumed = run_on(pool, tmp_path, plugin, resume=str(folder / "checkpoint-3"))
    assert_same(resumed, whole, tolerance=1e-5, after=3)


@pytest.mark.filterwarnings("ignore:.* documents are:UserWarning")
@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            {"capacity": 80, "long_documents": "split"},
            r"a piece of document 1 has 100 tokens, but all ranks together hold 1 ranks \* 80 tokens \(capacity\) = 80\. "
            r"Valid: capacity >= 100, or >= 2 ranks, or longest_document <= 80 instead of 100 \(a resumed run keeps its own\)",
        ),
        ({"capacity": 250}, r"resuming with \{'long_documents': 'error'\}, .* \{'long_documents': 'split'\}"),
        (
            {"capacity": 100, "long_documents": "split", "longest_document": 50},
            r"resuming with \{'longest_document': 50\}, but the checkpoint was made with \{'longest_document': 100\}",
        ),
    ],
)
def test_a_resumed_run_that_would_cut_elsewhere_is_refused(
    plugin: dict[str, Any], message: str, split_on_two: tuple[Path, Run], tmp_path: Path
):
    folder, _ = split_on_two
    with pytest.raises(ValueError, match=message):
        run_on(None, tmp_path, plugin, resume=str(folder / "checkpoint-3"))


def test_the_checkpoint_remembers_policy_and_limit(split_on_two: tuple[Path, Run]):
    folder, _ = split_on_two
    callbacks: Any = TrainerState.load_from_json(str(folder / "checkpoint-3" / "trainer_state.json")).stateful_callbacks
    stored = callbacks["RunState"]["args"]
    assert (stored["long_documents"], stored["longest_document"]) == ("split", 100)


@pytest.mark.filterwarnings("ignore:.* documents are:UserWarning")
def test_a_limit_may_be_set_and_what_was_cut_can_be_looked_at(tmp_path: Path):
    fresh_accelerator_state()
    plugin = LongContextPlugin(capacity=300, long_documents="truncate", longest_document=40, **BATCH)
    trainer = LongContextTrainer(
        tiny_llama(), arguments(tmp_path), train_dataset=Dataset.from_list(documents(LENGTHS)), plugin=plugin
    )
    pieces = trainer.training_steps().pieces
    long = [length for length in LENGTHS if length > 40]
    assert pieces.cuts == Cuts(len(long), len(long), sum(long) - 40 * len(long), sum(long) - 40 * len(long))
    assert pieces.lengths.tolist() == [min(length, 40) for length in LENGTHS]
