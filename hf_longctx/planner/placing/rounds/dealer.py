"""Rounds of about one height that documents may be dealt to: how many, and how high they are.

Estimates (levels.py) say when such rounds would end; dealing (dealing.py, unequal_dealing.py) then says when they do. An estimate
may be too low, so documents are dealt to higher rounds too.

Interpreted or compiled (planner/compiled.py); integers decide, and a few numbers in float64, the same on every machine. Nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.cost.group_times import PlacementContext
from hf_longctx.planner.placing.rounds.dealing import deal
from hf_longctx.planner.placing.rounds.levels import COUNTS, levels
from hf_longctx.planner.placing.rounds.sequence import Documents, heights_of, waiting_of
from hf_longctx.planner.placing.rounds.unequal_dealing import deal_to_unequal
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting
from hf_longctx.planner.topology import FULL, Topology

FEW_HALVINGS = 3
"""How often the ratio of neighbouring heights is halved (sequence.py)."""
DEALT = 3
"""Most estimates, the lowest first, of which documents are dealt."""
FEW_DOCUMENTS, DEALT_OF_FEW = 500, 8
"""Documents up to which more estimates are followed where ranks are unequal: they are worse there."""
RAISED = (1000, 1010, 1030, 1060, 1100, 1150, 1250)
"""Thousandths of an estimated height to which documents are dealt; on equal ranks, and of many, until that ends no sooner. An
estimate does not know that whole documents may find no place of their own: 6,927 were to end at 1.238 times the bound, in two
rounds; some lay on others at that height, and three rounds ended at 1.87; a 100th higher, two at 1.244."""
AS_ESTIMATED = 1010
"""Thousandths of an estimate within which documents that are dealt to equal ranks are not dealt to higher rounds."""
DEALT_DOCUMENTS, RANKS_EACH, DEALT_MEMBERS = 25_000, 5, 20_000
"""Documents up to which they are dealt to unequal ranks, ranks that they may need each, on average, and, where ranks are of many
kinds and a group's time takes long to find, ranks of them all. Of 82 drawn steps, the 18 that gained had up to 22,000 and 4."""


class Estimate(NamedTuple):
    """Rounds of about one height."""

    end: int
    """Nanoseconds that all of them take, about."""
    rounds: int
    height: int
    """Nanoseconds."""
    even: bool
    """Whether groups share nodes evenly."""


class Dealer:
    """Documents of a step, longest first, and the ranks that they may be dealt to."""

    def __init__(self, documents: Documents, members: int, topology: Topology, context: PlacementContext) -> None:
        """`members`: ranks of all documents together, on the fewest that hold each."""
        self._documents, self._topology, self._context = documents, topology, context
        count = len(documents.lengths)
        self._many = topology.uniform or count > FEW_DOCUMENTS
        self.most_estimates = DEALT if self._many else DEALT_OF_FEW
        """Estimates, the lowest first, that are worth dealing for."""
        self._may_deal = topology.uniform or (
            count <= DEALT_DOCUMENTS
            and members <= RANKS_EACH * count
            and (topology.few_kinds or members <= DEALT_MEMBERS)
        )

    def estimates(self, undone: np.ndarray) -> list[Estimate]:
        """Return the rounds that end first of those that the documents of these indices may be dealt to, by their end; none where
        dealing takes too long."""
        if not self._may_deal:
            return []
        rows = self._levels(undone) if self._context.uniform else self._unequal_levels(undone)
        _, first = np.unique(rows[:, 0], return_index=True)
        return [
            Estimate(end, rounds, height, bool(even))
            for end, rounds, height, even in rows[first[: self.most_estimates]].tolist()
        ]

    def dealt(self, undone: np.ndarray, estimate: Estimate) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Deal these documents to rounds as estimated, or higher; return when each ends, none if they find no room, and columns
        of `deal`."""
        documents, context = self._waiting(undone), self._context
        best: tuple[np.ndarray, Sequence[np.ndarray]] = np.empty(0, np.int64), ()
        for raised in RAISED:
            columns = tuple(np.empty(len(undone), np.int64) for _ in range(3))
            height = estimate.height * raised // 1000
            if context.uniform:
                times = deal(estimate.rounds, height, estimate.even, documents, context, *columns)
            else:
                times = deal_to_unequal(estimate.rounds, height, documents, context, *columns)
            if len(best[0]) and (not len(times) or times.sum() >= best[0].sum()):
                if self._many:
                    break
            else:
                best = times, columns
            # Equal ranks that take no longer than estimated are as good as can be.
            if context.uniform and len(times) and times.sum() * 1000 <= estimate.end * AS_ESTIMATED:
                break
        return best

    def _unequal_levels(self, undone: np.ndarray) -> np.ndarray:
        """Return the same as `_levels`, of unequal ranks, as if all were busy until their round ends."""
        own, shared = self._documents.tokens, self._documents.shared
        least = int(self._documents.least[undone[0]]) * FULL // int(self._topology.speeds.max())
        work = int(shared[undone].sum()) * FULL // int(self._topology.speeds.sum())
        fewest = -(-int(own[undone].sum()) // self._topology.tokens)
        rounds = np.arange(fewest, fewest + COUNTS)
        height = np.maximum(work // rounds + self._context.micro_batch, least)
        return np.stack([rounds * height, rounds, height, np.zeros_like(rounds)], axis=1)

    def _levels(self, undone: np.ndarray) -> np.ndarray:
        """int64 [levels, 4], the columns of `Estimate`: rounds of about one height, which may hold these documents."""
        context, alone = self._context, self._documents.alone
        heights = heights_of(int(undone[0]), FEW_HALVINGS, self._documents, context)
        whole = undone[self._documents.footprints[undone] <= context.capacity][:1]
        longest_whole = int(alone[whole[0]]) + context.micro_batch if len(whole) else 0
        fewest = -(-int(self._documents.tokens[undone].sum()) // self._topology.tokens)
        return np.asarray(levels(fewest, heights, longest_whole, self._waiting(undone), context))

    def _waiting(self, undone: np.ndarray) -> Waiting:
        return Waiting(*waiting_of(self._documents, undone))
