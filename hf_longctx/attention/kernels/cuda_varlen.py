"""torch's variable-length flash attention for CUDA: one call for all the blocks of a step.

The blocks of a step become the sequences of one varlen call. Runs of rows that already lie end to end are passed as
views; where two blocks share keys (a document of which this rank holds several segments), the keys are gathered and
their gradients added back.

    blocks  q[0:2) x k[0:2),  q[2:4) x k[0:4)        cu_seqlens_q 0 2 4    cu_seqlens_k 0 2 6    keys 0 1 | 0 1 2 3

The aten operations are called, not `varlen_attn`, because its autograd ignores the gradient of the log-sum-exp: the
backward operation itself takes the global `out` and `lse`. Tested where a GPU is at hand (tests/test_kernels.py).
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.partial import Partial
from hf_longctx.layout import Block

Runs = list[tuple[int, int]]

_MAX_HEAD_DIM = 256


class CudaVarlen:
    """See the module's docstring; the interface is `Kernel`."""

    name = "cuda_varlen"

    def unsupported(self, q: torch.Tensor, k: torch.Tensor) -> str | None:
        if q.device.type != "cuda":
            return f"needs tensors on cuda, these are on {q.device}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, these are {q.dtype}"
        if q.shape[-1] > _MAX_HEAD_DIM or q.shape[-1] % 8:
            return f"needs a head dimension that is a multiple of 8 up to {_MAX_HEAD_DIM}, this one is {q.shape[-1]}"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return f"needs compute capability 8.0, {torch.cuda.get_device_name(q.device)} has less"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], scale: float
    ) -> Iterator[Partial]:
        q_runs, k_runs = _runs(blocks)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _gather(q, q_runs),
            _gather(k, k_runs),
            _gather(v, k_runs),
            *_sequences(q_runs, k_runs, q.device),
            0.0,
            blocks[0].causal,
            False,
            scale=scale,
        )
        row = 0
        for start, stop in _joined(q_runs):
            length = stop - start
            yield Partial(start, stop, out[row : row + length], lse[:, row : row + length])
            row += length

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[Block],
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        q_runs, k_runs = _runs(blocks)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _gather(grad_out, q_runs),
            _gather(q, q_runs),
            _gather(k, k_runs),
            _gather(v, k_runs),
            _gather(out, q_runs),
            _gather(lse.t(), q_runs).t().contiguous(),
            *_sequences(q_runs, k_runs, q.device),
            0.0,
            blocks[0].causal,
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            unused,
            scale=scale,
        )
        _add_back(grad_q, dq, q_runs)
        _add_back(grad_k, dk, k_runs)
        _add_back(grad_v, dv, k_runs)


def _runs(blocks: Sequence[Block]) -> tuple[Runs, Runs]:
    return [(b.q_start, b.q_stop) for b in blocks], [(b.k_start, b.k_stop) for b in blocks]


def _joined(runs: Runs) -> Runs:
    """Runs with those that touch made one."""
    joined: Runs = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _gather(x: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The rows of x in the order of the runs; a view where they are one run."""
    pieces = [x[start:stop] for start, stop in _joined(runs)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _add_back(gradient: torch.Tensor, rows: torch.Tensor, runs: Runs) -> None:
    row = 0
    for start, stop in _joined(runs):
        gradient[start:stop] += rows[row : row + stop - start]
        row += stop - start


def _sequences(q_runs: Runs, k_runs: Runs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """cu_seqlens_q and cu_seqlens_k (int32, [blocks + 1]), and the longest sequence of each."""
    lengths = torch.tensor([[stop - start for start, stop in runs] for runs in (q_runs, k_runs)])
    starts = torch.zeros(2, lengths.shape[1] + 1, dtype=torch.int32)
    starts[:, 1:] = lengths.cumsum(1)
    starts = starts.to(device, non_blocking=True)
    return starts[0], starts[1], int(lengths[0].max()), int(lengths[1].max())
