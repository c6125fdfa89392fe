"""Static context parallelism: one group size for all documents of a run, as Megatron-LM trains long ones.

The degree is the least divisor of the ranks with which a group holds the context that the run is set up for. Documents,
longest first, are packed to what a group holds, first fit; pack i runs on group i mod (R / degree), and every document
of it, however short, is split over all ranks of the group:

    6 ranks, degree 3:     ranks 0-2   | pack 0 | pack 2 | pack 4 |
                           ranks 3-5   | pack 1 | pack 3 |

Unpacked, every document is a pack of its own. So NeMo Automodel trains Qwen3-32B on trajectories of up to 128K tokens:
128 GPUs, groups of 16, one document in a micro-batch of a group. It deals documents as its sampler draws them; longest first, as
here, is kinder to it.

Every key and value goes once around the group's ring, whoever needs it (CostModel.ring_times). Here, nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.micro_batches import Step
from hf_longctx.planner.placing.packing import first_fit, grouped
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import PlanError, Topology


@as_work_decides
def plan_static_cp(
    lengths: np.ndarray,
    topology: Topology,
    cost: CostModel,
    mode: Mode = "async",
    *,
    context: int = 0,
    packed: bool = True,
) -> StepPlan:
    """Plan one optimizer step.

    Args:
        context: tokens of the longest document that the run is set up for. Without it the degree suits the longest one of
            this step, which no run can do.
        packed: whether short documents share a micro-batch; otherwise each has its own.

    Raises:
        PlanError: nothing to plan, a document or a context that all ranks together cannot hold, unequal ranks, documents that
            must stay whole (or alone) and would not, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    step.refuse_unequal_ranks("static context parallelism")
    ordered = step.lengths[step.by_length]
    degree = context_degree(max(context, int(ordered[0])), topology)
    if degree > 1:
        step.refuse_kept_whole("static context parallelism", f"splits each over {degree} ranks")
    elif packed:
        step.refuse_kept_whole("static context parallelism", "packs short ones", kinds=("alone",))
    pack = first_fit(ordered, degree * topology.capacity) if packed else np.arange(len(ordered))
    packs = int(pack.max()) + 1
    documents, first_document = grouped(pack, packs)
    by_pack, begins = ordered[documents], first_document[:-1]
    # A rank without a token runs nothing: a pack of fewer tokens than the degree takes fewer ranks.
    sizes = np.minimum(degree, np.add.reduceat(by_pack, begins))
    costs = pack_times(by_pack, begins, sizes, step)
    first_rank = np.arange(packs) % (topology.world_size // degree) * degree
    first_member = np.cumsum(sizes) - sizes
    member = np.repeat(first_rank - first_member, sizes) + np.arange(int(sizes.sum()))
    micro_batch = np.empty(len(ordered), np.int64)
    micro_batch[step.by_length] = pack
    name = "static_cp" if packed else "static_cp_unpacked"
    return step.plan(name, micro_batch, sizes, member, costs, "ring")


def context_degree(context: int, topology: Topology) -> int:
    """Return the ranks of a group that holds `context` tokens.

    Raises:
        PlanError: all ranks together do not hold so many.
    """
    ranks, capacity = topology.world_size, topology.capacity
    if context > topology.tokens:
        raise PlanError(
            f"a context of {context} tokens exceeds {ranks} ranks x {capacity} tokens = {topology.tokens}; it needs "
            f">= {-(-context // capacity)} ranks, or a capacity >= {-(-context // ranks)}"
        )
    return next(d for d in range(1, ranks + 1) if ranks % d == 0 and d * capacity >= context)


def pack_times(lengths: np.ndarray, begins: np.ndarray, ranks: np.ndarray, step: Step) -> np.ndarray:
    """int64 [packs], nanoseconds of each.

    ring_times lets one document's attention hide another's ring, and rounds down, while the lower bound has each document
    wait for its own exchange: less than the bound counts must not come out.

    Args:
        lengths: int64 [documents], tokens, one pack after the other, longest first in each.
        begins, ranks: int64 [packs]: the first document of each, and its ranks.
    """
    cost = step.cost
    whole = np.add.reduceat(cost.time(lengths, 1), begins)
    least = -(-np.add.reduceat(cost.work(lengths, step.topology.fewest_ranks(lengths)), begins) // ranks)
    of_each = cost.time(lengths, np.repeat(ranks, np.diff(begins, append=len(lengths))))
    shared = np.maximum(least, np.maximum.reduceat(of_each, begins))
    times = np.where(ranks == 1, whole, shared) + cost.micro_batch_ns
    return np.where(ranks == 1, times, np.maximum(times, cost.ring_times(lengths, begins, ranks)))
