"""Work of the host for one layer's attention, forward and backward, with a kernel that does nothing: torch's operations, tensors
that are made, Python calls, and seconds of a core.

    python benchmarks/host_work.py --json benchmarks/results/host_work.json --before OLDER_TREE --check host-work

The older tree (git archive COMMIT hf_longctx | tar -x -C ...) is measured in turn with this one, in processes of their own: the
least seconds of each. Peers are torch's "fake" process group, which sends nothing; batches of messages are torch's own. A rank of
64 that share one document has 63 rounds; documents of 8 tokens on one rank have none.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import conclude, parser

ROOT = Path(__file__).parents[1]
CASES = {"63 rounds": (64, 0), "128 documents": (1, 128), "1,024 documents": (1, 1024)}
"""Name -> ranks, and whole documents of one rank."""
TURNS, CALLS = 3, 20
REPORTED = ("operations", "tensors made", "Python calls", "ms")


def measured(case: str) -> dict[str, float]:
    """Return what one layer takes, once an earlier one has laid out what all share."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from hf_longctx import Layout, Segment, zigzag
    from hf_longctx.attention.engine import layout_attention
    from hf_longctx.attention.exchange import Exchange
    from hf_longctx.attention.kernels import KERNELS
    from hf_longctx.attention.kernels.varlen import VarlenKernel

    class WithoutArithmetic(VarlenKernel):
        name = "without_arithmetic"

        def unavailable(self, capability: Any) -> None:
            return None

        def max_head_dim(self, capability: Any, head_dim: int) -> int:
            return 256

        def unsupported(self, *_: Any) -> None:
            return None

        # Trees before calls were one object pass q, k and v: to backward, behind the gradient of the output.
        def run_forward(self, call: Any, *before: Any) -> Any:
            q = call if before else call.q
            return torch.empty_like(q), torch.zeros(q.shape[1], q.shape[0])

        def run_backward(self, call: Any, *rest: Any) -> Any:
            q, k, v = rest[:3] if rest[3:] else call[:3]
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    class Counted(TorchDispatchMode):
        operations = made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            given = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
            results = result if isinstance(result, (tuple, list)) else [result]
            tensors = [entry for entry in results if isinstance(entry, torch.Tensor)]
            self.operations += 1
            self.made += sum(tensor.untyped_storage()._cdata not in given for tensor in tensors)
            return result

    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    KERNELS[WithoutArithmetic.name] = WithoutArithmetic()
    ranks, documents = CASES[case]
    rank = 5 if ranks > 1 else 0
    layout = Layout(zigzag(0, 16 * ranks, range(ranks))) if ranks > 1 else None
    layout = layout or Layout({0: [Segment(doc, 0, 8) for doc in range(documents)]})
    exchange = None
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        with patch.object(dist, "get_backend", lambda *_: "gloo"):
            exchange = Exchange(ranks_per_node=8)
    tokens = layout.tokens(rank)
    q, k, v = (torch.zeros(tokens, heads, 8, requires_grad=True) for heads in (8, 2, 2))
    gradient = torch.zeros(tokens, 8, 8)

    def layer() -> None:
        layout_attention(q, k, v, layout, exchange, kernel=WithoutArithmetic.name).backward(gradient)

    layer(), layer()
    with Counted() as counted:
        layer()
    calls = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(called)
    layer()
    sys.setprofile(None)
    seconds = []
    for _ in range(CALLS):
        began = time.process_time()
        layer()
        seconds.append(time.process_time() - began)
    return dict(zip(REPORTED, (counted.operations, counted.made, calls, 1000 * min(seconds))))


def run(case: str, tree: Path) -> dict[str, float]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{case} in {tree}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--before", type=Path, help="compare with an older checkout of this repository")
    options.add_argument("--measure", choices=list(CASES), help="print what one case takes here, and no more")
    arguments = options.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure)))
        return 0
    load = os.getloadavg()[0]
    trees = {"now": ROOT} | ({"before": arguments.before.resolve()} if arguments.before else {})
    rows, figures = [], dict[str, float]()
    for case in CASES:
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(TURNS):
            for name, tree in trees.items():
                taken[name].append(run(case, tree))
        least = {name: {what: min(turn[what] for turn in turns) for what in REPORTED} for name, turns in taken.items()}
        row = {"layer": case}
        for what in REPORTED:
            row |= {f"{what}, {name}": f"{work[what]:.3g}" for name, work in least.items()}
            figures |= {f"{case}/{what}, {name}": work[what] for name, work in least.items()}
            if "before" in least:
                figures[f"{case}/{what}, times less"] = least["before"][what] / least["now"][what]
        print(row, flush=True)
        rows.append(row)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
