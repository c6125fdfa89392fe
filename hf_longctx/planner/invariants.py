"""Invariants of a plan: whatever a planner did, every document is planned once, on ranks that can hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hf_longctx.planner.stages.causal_chunks import most_chunks
from hf_longctx.planner.topology import SPLIT, PlanError

if TYPE_CHECKING:
    from hf_longctx.planner.plan import StepPlan


def check(plan: StepPlan, lengths: np.ndarray) -> None:
    """Raise PlanError, naming what breaks it, unless every invariant holds for documents of these lengths (tokens)."""
    counts = {"first_member": len(plan.rank), "first_document": len(plan.doc)}
    for name, count in counts.items():
        first = getattr(plan, name)
        if len(first) != len(plan.cost) + 1 or first[0] != 0 or first[-1] != count or (np.diff(first) < 1).any():
            raise PlanError(
                f"{name} must rise from 0 to {count}, one entry per micro-batch ({len(plan.cost)}) and one more: "
                "every micro-batch has a rank and a document"
            )
    members = np.repeat(np.arange(len(plan.cost)), plan.members)
    same = np.diff(members) == 0
    _refuse(
        plan, "rank", (plan.rank < 0) | (plan.rank >= plan.world_size), f"a rank must be 0 to {plan.world_size - 1}"
    )
    _refuse(plan, "rank", np.append(False, same & (np.diff(plan.rank) < 1)), "the ranks of a micro-batch ascend")
    _refuse(plan, "doc", (plan.doc < 0) | (plan.doc >= len(lengths)), f"a document must be 0 to {len(lengths) - 1}")
    planned = np.bincount(plan.doc, minlength=len(lengths))
    if (planned != 1).any():
        i = int((planned != 1).argmax())
        raise PlanError(f"document {i} is planned {planned[i]} times; every document is planned exactly once")
    _refuse(plan, "length", plan.length != lengths[plan.doc], "a document is planned with the tokens it has")
    if len(plan.labels):
        if len(plan.labels) != len(plan.doc):
            raise PlanError(
                f"labels has {len(plan.labels)} entries; it must have one for each of {len(plan.doc)} documents"
            )
        wrong = (plan.labels < 0) | (plan.labels > plan.length)
        _refuse(plan, "labels", wrong, "a document has 0 labels, up to one for each token")

    # A member's key is unique, its micro-batch and rank, and keys ascend, as was checked above.
    keys = members * plan.world_size + plan.rank
    held_by = plan.micro_batch_of_document * plan.world_size + plan.holder
    whole = plan.holder != SPLIT
    outside = (plan.holder < 0) | (plan.holder >= plan.world_size) | ~_among(held_by, keys)
    _refuse(plan, "holder", whole & outside, "a holder is a rank of the document's micro-batch")
    if plan.topology.stay_whole:
        _check_whole(plan)
    split = np.bincount(plan.micro_batch_of_document[~whole], minlength=len(plan.cost))
    if not plan.topology.uniform and (split > 1).any():
        raise PlanError(
            f"micro-batch {int(split.argmax())} splits {split.max()} documents; unequal ranks share one at a time"
        )
    room = plan.topology.capacities[plan.rank]
    offloaded = plan.member_tokens * plan.offload[members] * plan.offload_share // 10**6
    _refuse(plan, "rank", plan.member_tokens < 1, "every rank of a micro-batch holds a token")
    most = f"a rank holds at most {plan.topology.capacity} tokens in a micro-batch"
    _refuse(plan, "rank", plan.member_tokens - offloaded > room, most)
    if plan.mode == "lockstep":
        taken = np.sort(plan.round[members] * plan.world_size + plan.rank)
        if (np.diff(plan.round) < 0).any() or (np.diff(taken) == 0).any():
            raise PlanError("rounds ascend, and a rank runs at most one micro-batch in each")
    _check_chunks(plan)
    if (plan.offload < 0).any() or (plan.offload > 1000).any():
        raise PlanError(f"offload is {plan.offload.min()} to {plan.offload.max()}; it must be 0 to 1000 per mille")
    if (plan.cost < 1).any() or plan.timeline().makespan < plan.lower_bound:
        raise PlanError(f"costs must be >= 1 and no plan can beat the lower bound of {plan.lower_bound} ns")


def _check_whole(plan: StepPlan) -> None:
    """Raise PlanError where documents do not lie on ranks as the topology says."""
    kind = plan.topology.documents
    rule = f"the model needs every document whole on one rank (documents={kind!r})"
    _refuse(plan, "holder", plan.ranks_of_document > 1, f"a document on several ranks: {rule}")
    wrong = plan.chunks > 1
    if wrong.any():
        i = int(wrong.argmax())
        raise PlanError(f"micro-batch {i} runs in {plan.chunks[i]} chunks: {rule}, and in one pass")
    documents = np.diff(plan.first_document)
    if kind == "alone" and (documents > 1).any():
        i = int(documents.argmax())
        raise PlanError(f"micro-batch {i} holds {documents[i]} documents: {rule}, and alone in its micro-batch")


def _check_chunks(plan: StepPlan) -> None:
    """Raises PlanError where a micro-batch cannot run in its chunks."""
    if (plan.chunks == 1).all():
        return
    if plan.chunks.shape != plan.cost.shape or plan.chunks.min() < 1 or plan.chunks.max() > plan.topology.most_chunks:
        raise PlanError(
            f"chunks has {len(plan.chunks)} entries from {plan.chunks.min()} to {plan.chunks.max()}; it needs one for each "
            f"of {len(plan.cost)} micro-batches, 1 to {plan.topology.most_chunks}"
        )
    if plan.mode != "pipeline" or not plan.topology.uniform or plan.linear_tokens < 0:
        raise PlanError(
            f"chunks are up to {plan.chunks.max()} in mode {plan.mode!r}, equal ranks: {plan.topology.uniform}, "
            f"linear_tokens={plan.linear_tokens}; more than 1 needs mode 'pipeline', equal ranks, linear_tokens >= 0"
        )
    for i in np.flatnonzero(plan.chunks > 1).tolist():
        documents, ranks = int(np.diff(plan.first_document)[i]), int(plan.members[i])
        tokens = int(plan.length[plan.first_document[i]])
        fewest = min(np.diff([0, *plan.chunk_stops(i)]))
        if documents > 1 or fewest < ranks:
            raise PlanError(
                f"micro-batch {i} runs in {plan.chunks[i]} chunks with {documents} documents, the smallest chunk of "
                f"{fewest} tokens on {ranks} ranks; it needs one document, and a token of each chunk for every rank: at most "
                f"{most_chunks(tokens, ranks, plan.linear_tokens)} chunks of {tokens} tokens"
            )


def _among(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """bool, as `values`: whether each is among `ascending` (both int64); np.isin takes thirty times as long for a million."""
    if len(ascending) == 0:
        return np.zeros(len(values), bool)
    place = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return ascending[place] == values


def _refuse(plan: StepPlan, column: str, wrong: np.ndarray, rule: str) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        first = plan.first_member if column == "rank" else plan.first_document
        micro_batch = int(np.searchsorted(first, row, side="right")) - 1
        value = getattr(plan, column)[row]
        detail = f", which holds {plan.member_tokens[row]} tokens" if "holds" in rule and column == "rank" else ""
        raise PlanError(f"micro-batch {micro_batch}, {column}={value}{detail}: {rule}")
