"""When a wait is no longer usual: for how long an activity may last before its stack is shown, by how long it took before.

A healthy run stands still all the time: in a layer of a long document, in a compiler before the first step, in a save on a slow
disk. For how long, only the run itself can say; so limits follow it, on a machine that is ten times slower or busy with other
programs too. With report_after = 30 s and stall_timeout = 1800 s, a rank that everyone waits for
- is named, in one line, after 30, 60, 120 ... s: a notice, which a healthy run may print;
- shows its stack after 10 times the longest that it took from one move to the next in this activity so far, at least 120 s and at
  most 900 s; in an activity that it has not come through yet (the first step, the first save), whose pace nobody knows: 900 s;
- leaves after 1800 s, with the stacks of all its threads.
So a stack before half of stall_timeout means that the same was done before, and in less than a tenth of the time. Example: layers
take up to 20 s; one that stands still shows its stack after 200 s. Where a layer once took 95 s: after 900 s.

What may take any time (loading a model, planning the first steps) shows no stack, and ends nobody; unless a rank gives no sign
of life for stall_timeout, which then is gone, and would be waited for without an end.
"""

import math

from hf_longctx.supervision.progress import Progress

PACE = 10.0
"""Times the longest that an activity has taken so far."""
LEAST_REPORTS = 4.0
"""Times report_after: no stack is shown earlier."""


class Pace:
    """The pace of one rank, from one look at it to the next.

    Args:
        report_after: seconds without a move before the first notice.
        stall_timeout: seconds without a move after which a rank leaves.
    """

    def __init__(self, report_after: float, stall_timeout: float) -> None:
        self._least, self._most = LEAST_REPORTS * report_after, stall_timeout / 2
        self._longest: dict[tuple[bool, str], float] = {}
        """kind of activity -> seconds from one move to the next, at most"""
        self._kind = (False, "")
        self._moves = -1
        self.idle = 0.0
        """seconds since the rank moved"""

    def look(self, progress: Progress, elapsed: float) -> bool:
        """Counts the seconds since the last look; whether the rank has moved meanwhile."""
        self.idle += elapsed
        if progress.moves == self._moves:
            return False
        self._longest[self._kind] = max(self.idle, self._longest.get(self._kind, 0.0))
        self._kind, self._moves, self.idle = progress.kind, progress.moves, 0.0
        return True

    def is_unusual(self, progress: Progress) -> bool:
        """Whether the rank stands still for so long that its stack is worth showing."""
        return self.idle >= self.limit(progress)

    def limit(self, progress: Progress) -> float:
        """Seconds without a move after which that is so."""
        if progress.unbounded:
            return math.inf
        if progress.kind not in progress.passed:
            return self._most
        return min(self._most, max(self._least, PACE * self._longest.get(progress.kind, 0.0)))
