"""Spares tests and ranks from looking through all that is imported, again and again."""

import gc

YOUNG = 20_000
"""Objects made from one collection of the youngest to the next. Python's own is 700."""
RARELY = 100
"""Collections of middle-aged garbage from one of all garbage to the next. Python's own is 10."""


def freeze() -> None:
    """Take what there is now for what never becomes garbage, and look for old garbage rarely.

    Every training run collects garbage, and would look through all that was imported for 0.4 s. Python itself looks through
    everything again and again where little is old: 4 % of the time of tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, gc.get_threshold()[1], RARELY)
