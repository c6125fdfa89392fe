"""The pieces of a step, its plan, and what of it one rank reads: all of the loader that needs no torch.

The local loader runs it in the process of a rank, data/remote/ in actors: the same arrays come out, because all of it is a
function of (epoch, step, adjustment) alone. Nothing is sent between ranks.

Labels are shifted per document, before sharding, so that no shard boundary loses one: the label of a segment's last
token is the next token of the *document*, which another rank may hold; a document's last token predicts nothing.

    document 5 6 7 8 9 split as [0:2) [2:5)       input_ids     5 6 |  7 8 9
                                                  shift_labels  6 7 |  8 9 -100

T is the number of tokens that a rank holds in a step, all of its micro-batches together.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.data.length_index import IGNORE_INDEX
from hf_longctx.data.long_documents import Pieces, other_policies, read_piece
from hf_longctx.data.page_cache import will_read
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.planner import (
    PLANNERS,
    CostModel,
    EpochBatches,
    GlobalBatches,
    Mode,
    PlanError,
    StepPlan,
    Topology,
    plan_step,
)
from hf_longctx.planner.cost.adjustment import Adjustment
from hf_longctx.planner.cost.selective_offload import Offload

UNADJUSTED = Adjustment()


@dataclass(frozen=True)
class Planning:
    """How the lengths of a global batch become a plan; the same on every rank."""

    topology: Topology
    """the ranks: how many, what each holds, which of them share a node"""
    cost: CostModel
    """predicts times, which balance the plan"""
    planner: str = "hdp"
    """one of hf_longctx.planner.PLANNERS"""
    mode: Mode = "async"
    """whether ranks meet after every round (see hf_longctx.planner.hdp)"""
    offload: Offload | None = None
    """what host memory is worth; only planner hdp uses it, where ranks are equal and do not meet in rounds"""

    def plan(
        self, lengths: np.ndarray, adjustment: Adjustment = UNADJUSTED, label_tokens: np.ndarray | None = None
    ) -> StepPlan:
        """Plan a global batch with what the run has learned so far.

        lengths, label_tokens: int64 [documents], tokens of each, and those that have a label (None: all)."""
        cost = adjustment.cost(self.cost)
        if self.planner != "hdp":  # the planners that ours is compared with know equal ranks only, and no offload
            return PLANNERS[self.planner](lengths, self.topology, cost, self.mode)
        topology = adjustment.topology(self.topology)
        return plan_step(lengths, topology, cost, self.mode, self.offload if topology.uniform else None, label_tokens)


OF_EVALUATION = "to evaluate: "
"""Begins the reason why documents that are held out cannot be planned."""


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step, as all ranks see it."""

    plan: StepPlan
    num_items: int
    """label tokens of the step: what the loss is divided by"""
    num_tokens: int
    fingerprint: int
    """signed 64-bit hash of what all ranks must agree on before they run: the plan, and where known the rows of the
    data set"""


class StepPlans:
    """(epoch, step, adjustment) -> PlannedStep.

    Args:
        pieces: the documents, or parts of them, that are trained on.
        batches: global batches over the pieces, in their order.
        planning: what the plans are made with.

    Raises:
        PlanError: a piece is longer than all ranks together can hold, or one rank where documents stay whole.
    """

    def __init__(self, pieces: Pieces, batches: GlobalBatches, planning: Planning) -> None:
        refuse_too_long(pieces, planning.topology)
        self.pieces, self.batches, self.planning = pieces, batches, planning
        self._last_epoch: tuple[int, EpochBatches] | None = None

    def epoch(self, epoch: int) -> EpochBatches:
        """[step]: int64 pieces of its global batch."""
        last_epoch = self._last_epoch
        if last_epoch is None or last_epoch[0] != epoch:
            last_epoch = self._last_epoch = (epoch, self.batches.epoch(epoch))
        return last_epoch[1]

    def plan(self, epoch: int, step: int, adjustment: Adjustment) -> StepPlan:
        batch = self.epoch(epoch)[step]
        return self.planning.plan(self.pieces.lengths[batch], adjustment, self.pieces.label_tokens[batch])

    def planned(self, epoch: int, step: int, adjustment: Adjustment) -> PlannedStep:
        batch, pieces = self.epoch(epoch)[step], self.pieces
        plan = self.plan(epoch, step, adjustment)
        rows, starts = pieces.document[batch].tolist(), pieces.start[batch].tolist()
        agreed = f"{plan.digest()} {pieces.index.fingerprint} {epoch} {step} {rows} {starts}"
        return PlannedStep(
            plan, int(pieces.label_tokens[batch].sum()), int(pieces.lengths[batch].sum()), signed_hash(agreed)
        )

    def fingerprint(self) -> int:
        """Signed 64-bit hash of what all of this depends on: documents, global batches, and what plans are made with."""
        pieces, first = self.pieces, self.epoch(0)
        text = f"{pieces.index.fingerprint} {self.planning} {len(first)} {len(pieces)}"
        arrays = (pieces.document, pieces.start, pieces.lengths, pieces.label_tokens, first[0], first[-1])
        return signed_hash(text, *(array.astype("<i8").tobytes() for array in arrays))

    def read(
        self, dataset: Any, epoch: int, step: int, layouts: Iterable[Layout], rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a rank holds in a step: `read_shards` of a data set."""
        batch = self.epoch(epoch)[step]
        return read_shards(layouts, rank, lambda doc: read_piece(dataset, self.pieces, int(batch[doc])))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the epoch drawn last: other processes draw it again faster than it is sent."""
        return self.__dict__ | {"_last_epoch": None}


def signed_hash(text: str, *more: bytes) -> int:
    """Signed 64 bits, the same on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for part in more:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def read_shards(
    layouts: Iterable[Layout], rank: int, read: Callable[[int], Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] each: tokens and shifted labels of a rank's shards, one micro-batch after another, in memory order.

    Args:
        layouts: the micro-batches that the rank takes part in, the chunks of a document one after another.
        rank: whose shards.
        read: document of the global batch -> its row; called once for each document of which the rank holds a part.

    Raises:
        ValueError: a document has another length than it was planned with.
    """
    pieces = [(np.zeros(0, np.int64),) * 2]
    layouts = list(layouts)
    planned: dict[int, int] = {}
    for layout in layouts:  # the last chunk of a document knows its length
        planned |= layout.doc_lengths
    documents: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for layout in layouts:
        shard = layout.shard(rank)
        here = dict.fromkeys(segment.doc for segment in shard)
        documents = {doc: documents.get(doc) or _tokens_and_labels(read(doc)) for doc in here}
        for doc, (tokens, labels) in documents.items():
            if not len(tokens) == len(labels) == planned[doc]:
                raise ValueError(
                    f"document {doc} of the global batch was planned with {planned[doc]} tokens, but reading it gave "
                    f"{len(tokens)} tokens and {len(labels)} labels: a data set (or its transform) must give the same document "
                    "every time"
                )
        pieces += [_slice(*documents[segment.doc], segment) for segment in shard]
    return np.concatenate([tokens for tokens, _ in pieces]), np.concatenate([labels for _, labels in pieces])


def _tokens_and_labels(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """[T] each; without labels, every token is one."""
    tokens = np.asarray(row["input_ids"])
    return tokens, np.asarray(row["labels"]) if "labels" in row else tokens


def _slice(tokens: np.ndarray, labels: np.ndarray, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
    """int64 [tokens of the segment] each: its tokens and shifted labels, from those of its document."""
    following = labels[segment.start + 1 : segment.stop + 1]
    will_read(tokens[segment.start : segment.stop])
    will_read(following)
    shifted = np.full(len(segment), IGNORE_INDEX, np.int64)
    shifted[: len(following)] = following
    return tokens[segment.start : segment.stop].astype(np.int64), shifted


def refuse_too_long(pieces: Pieces, topology: Topology) -> None:
    """Raises PlanError if a piece is longer than all ranks together can hold, or one rank where documents stay whole."""
    longest = int(pieces.lengths.argmax())
    length, limit = int(pieces.lengths[longest]), topology.longest_document
    if length <= limit:
        return
    name = f"{'a piece of ' if pieces.is_part(longest) else ''}document {pieces.document[longest]}"
    shorter = (
        f"a shorter document, or {other_policies(length, limit)}"
        if pieces.policy == "error"
        else f"longest_document <= {limit} instead of {pieces.limit} (a resumed run keeps its own)"
    )
    if topology.stay_whole:
        topology.refuse_too_long(length, name, f": {shorter}")
    per_stage = f", each of {topology.stages} stages" if topology.stages > 1 else ""
    raise PlanError(
        f"{name} has {length} tokens, but all ranks together hold {topology.world_size} ranks * {topology.capacity} tokens "
        f"(capacity) = {limit}. Valid: capacity >= {-(-length // topology.world_size)}, or >= "
        f"{-(-length // topology.capacity)} ranks{per_stage}, or {shorter}"
    )
