"""The command line: `hf-longctx VERB`, or `python -m hf_longctx VERB`.

Verbs import what they run only when they run.
"""

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; without one, `kernels`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hf-longctx", description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(metavar="VERB")
    kernels = verbs.add_parser("kernels", help="which attention kernel each feature uses on this machine, and why")
    kernels.set_defaults(run=_kernels)
    parser.set_defaults(run=_kernels)
    return parser.parse_args(arguments).run()


def _kernels() -> int:
    from hf_longctx.attention.kernels.report import kernel_report

    print(kernel_report())
    return 0
