"""`--planner` on the command line -> names of planners, and what they can be asked for."""

MOST_RANKS = 2**20
"""A plan for so many takes a minute and some GiB; of 2**30, memory runs out and the kernel ends this process."""
MOST_CAPACITY = 2**27
"""Tokens on a rank. The planners that are compared keep tables of as many rows, 2 GiB here."""
MICRO_BATCHES = 4
"""Micro-batches of each rank in a step of the default size: enough to balance."""


def read_planners(asked: str) -> list[str]:
    """List the planner that is asked for, or all of them for "all". Raises ValueError for an unknown one."""
    from hf_longctx.planner import PLANNERS

    if asked != "all" and asked not in PLANNERS:
        raise ValueError(f"--planner {asked!r} is unknown; valid: all, {', '.join(PLANNERS)}")
    return list(PLANNERS) if asked == "all" else [asked]


def refuse_beyond_planners(ranks: tuple[str, int], capacity: tuple[str, int | None]) -> None:
    """Raise ValueError for more ranks, or tokens on one, than plans can be made for in a machine's memory.

    Args:
        ranks: option and number.
        capacity: option and number; None: it is not given.
    """
    for (option, number), most in ((ranks, MOST_RANKS), (capacity, MOST_CAPACITY)):
        if number is not None and number > most:
            raise ValueError(f"{option} {number} is more than plans are made for; valid: 1 to {most}")
