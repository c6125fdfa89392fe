"""Planned steps of large models on a GPU that is not there: what makes the host wait for the device, over a wide matrix.

    python benchmarks/fake_cuda.py --json benchmarks/results/fake_cuda.json --check host-waits      # 40 minutes beside other work
    python benchmarks/fake_cuda.py --models llama-8b --tokens 131072                         # a few

Tensors have shapes, types and devices and no values (tests/worlds/fake_cuda/): a step of one rank is planned, collated, pinned
and run, forward and backward, through two layers of true widths (three where they offload), and every copy between host and
device is looked at. An operation on tensors of two devices ends a case, and so does a question about a value. Needs a C++
compiler.

What tokens experts get is such a value, which transformers asks for once a layer and forward where experts are spread over ranks:
listed stand-ins answer, uniform or half of all choices to the first process, and this wait is counted apart.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import conclude, parser

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from tests.worlds.fake_cuda.cases import MODELS, ROUTERS, SPLIT_SIZES, Case

ROOT = Path(__file__).parents[1]
PLACES = {131072: (8,), 524288: (64,), 1048576: (128, 1024)}
"""Tokens of the longest document -> ranks."""
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2", "documents": 1},
    "zero3": {"sharding": "zero3", "documents": 1},
    "offload": {"offload": 0.5, "layers": 3},
    "ulysses": {"ulysses": 8},
    "last slice kept": {"keep_last_slice": True},
    "tensor parallel": {"tensor_parallel": 8, "documents": 1},
    "stages": {"stages": 4, "documents": 1},
}
"""In lockstep every document is split over ranks: one a rank beside the long ones are enough."""
SPREAD_EXPERTS = {
    f"experts, {router}": {"expert_parallel": 8, "sharding": "zero3", "documents": 1, "router": router}
    for router in ROUTERS
}
"""Of models that have experts."""
MOST_RANKS = {"tensor parallel": 128, "stages": 8} | dict.fromkeys(SPREAD_EXPERTS, 128)
"""Ranks up to which a variant is run: one of stages on 64 has 30 chunks, in minutes, and nothing in them that 8 have not."""


def cases(models: list[str], tokens: list[int], variants: list[str]) -> Iterator[Case]:
    """The matrix."""
    for model in models:
        known = VARIANTS | (SPREAD_EXPERTS if MODELS[model].num_local_experts else {})
        for longest in tokens:
            for ranks in PLACES[longest]:
                capacity = max(16384, 2 * longest // ranks)
                for name, options in known.items():
                    if name in variants and ranks <= MOST_RANKS.get(name, ranks):
                        yield Case(model, ranks, capacity, longest, **{"layers": 2} | options)


def run(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was seen of planted faults, and of the case.

    Raises:
        RuntimeError: the step failed; says how.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.worlds.fake_cuda", json.dumps({"case": asdict(case)})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 2:
        raise RuntimeError(f"{case.name}: {done.stderr}")
    return lines[0], lines[1]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options.add_argument("--tokens", nargs="+", type=int, choices=list(PLACES), default=list(PLACES))
    every = [*VARIANTS, *SPREAD_EXPERTS]
    options.add_argument("--variants", nargs="+", choices=every, default=every)
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    rows, figures = [], dict[str, float]()
    for case in cases(arguments.models, arguments.tokens, arguments.variants):
        planted, seen = run(case)
        asked = sum(count for wait, count in seen["waits"].items() if wait.startswith(SPLIT_SIZES))
        waits = sum(seen["waits"].values()) - asked
        if case.expert_parallel > 1:
            per_layer = asked / (case.layers * seen["micro_batches"])
            figures[f"{case.name}/waits for tokens of experts, a layer and micro-batch"] = per_layer
        figures[f"{case.name}/host waits"] = waits
        figures[f"{case.name}/micro-batches of several ranks"] = seen["split"]
        figures["planted/host waits"] = sum(planted["waits"].values())
        figures["planted/refused"] = sum(planted["refused"].values())
        print(f"{case.name}: {seen['waits'] or 'no wait'}, {seen['seconds']} s", flush=True)
        rows.append(
            {
                "step": case.name,
                "micro-batches": str(seen["micro_batches"]),
                "of several ranks": str(seen["split"]),
                "host waits": str(waits),
                "waits for tokens of experts": str(asked),
                "copies beside compute": str(sum(seen["copies"].values())),
                "GiB sent": f"{seen['sent'] / 2**30:.1f}",
                "attention calls": str(sum(seen["kernels"].values())),
            }
        )
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
