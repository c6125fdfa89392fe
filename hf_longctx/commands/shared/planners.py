"""`--planner` on the command line -> names of planners."""


def read_planners(asked: str) -> list[str]:
    """List the planner that is asked for, or all of them for "all". Raises ValueError for an unknown one."""
    from hf_longctx.planner import PLANNERS

    if asked != "all" and asked not in PLANNERS:
        raise ValueError(f"--planner {asked!r} is unknown; valid: all, {', '.join(PLANNERS)}")
    return list(PLANNERS) if asked == "all" else [asked]
