"""Shared by the variable-length flash kernels for CUDA: blocks become the sequences of a few varlen calls.

1. Blocks of one mask go into one call. A call is closed before its rows exceed twice those of the tensors, so that
   what is gathered stays linear in tokens however many blocks share rows.
2. Runs of rows that lie end to end are passed as views; where blocks share rows or skip some, rows are gathered, and
   their gradients added back.
3. Masks are flash-attention's windows: query x sees keys x - left to x + right, where -1 is unlimited. Rows are
   aligned at the bottom right, which in a square block is also the top left.

       FULL  (-1, -1)          CAUSAL  (-1, 0)          ANTICAUSAL  (0, -1)

4. ALiBi is folded into eight more head dimensions (alibi_fold.py), unless the kernel itself has it exactly.

    blocks  q[0:2) x k[0:2),  q[2:4) x k[0:4)        cu_seqlens_q 0 2 4    cu_seqlens_k 0 2 6    keys 0 1 | 0 1 2 3

Kernels are called below their autograd, which ignores the gradient of the log-sum-exp: the backward itself takes the
global `out` and `lse`. Where torch's global switch asks for deterministic algorithms (torch.use_deterministic_algorithms,
TrainingArguments' full_determinism), so does every call, and the same blocks give the same bits. It is off unless asked for:
on an H100 it made backward 1.25 to 1.8 times as long (docs/performance.md).

Shapes: T tokens, Hq query heads, Hkv key/value heads, D head dimension, B blocks of a call.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from hf_longctx.attention.kernels.accumulate import Partial
from hf_longctx.attention.kernels.alibi_fold import ALIBI_DIMS, Rows, key_dims, lse_shift, query_dims, with_dims
from hf_longctx.attention.kernels.interface import ALIBI_OR_SOFT_CAP, AttentionCall, Gradients
from hf_longctx.attention.on_device import on_device
from hf_longctx.hardware.kernel_bytes import Workspace
from hf_longctx.layouts.blocks import Block, Blocks, Mask

Runs = Sequence[tuple[int, int]]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, or their gradients."""

WINDOWS = {Mask.FULL: (-1, -1), Mask.CAUSAL: (-1, 0), Mask.ANTICAUSAL: (0, -1)}
"""Mask -> flash-attention's window (left, right)."""


@dataclass(frozen=True)
class Sequences:
    """Blocks of one mask, as a varlen call takes them."""

    mask: Mask
    queries: Rows
    keys: Rows
    distances: torch.Tensor
    """int32 [B], that of each block."""
    beside_messages: bool = False
    """Whether messages travel meanwhile, whose kernels want multiprocessors of their own."""

    @property
    def window(self) -> tuple[int, int]:
        """(left, right), -1 for unlimited."""
        return WINDOWS[self.mask]


class VarlenCall(NamedTuple):
    """An `AttentionCall` as a varlen function takes it: sequences in place of blocks, and their rows end to end."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequences: Sequences
    scale: float
    slopes: torch.Tensor | None = None
    """of causal sequences, and only where the kernel has `exact_causal_alibi`"""
    softcap: float | None = None
    """only where the kernel has `soft_caps`"""


class VarlenKernel(ABC):
    """A `Kernel` made of one varlen flash kernel: subclasses say what it can do, and call it."""

    name: str
    workspace: Workspace
    alibi_tile = 4096
    """A causal block's bias reaches slope * 4096, which float32 rounds by up to 2.4e-4 at a slope of 1: a sixteenth of what
    bfloat16 rounds a probability by."""
    value_dims = False
    soft_caps = False
    """Whether forward and backward take a soft cap."""
    exact_causal_alibi = False
    """Whether the kernel's own bias of a causal block is slope * (x - y), computed from the difference."""

    compiles = False
    """Whether a kernel is compiled at the first call of each kind (warming.py)."""
    sums_parts = False
    """Whether a deterministic backward gives each thread block parts of every sequence in turn: then the longest sequence of a
    call decides how many there are, so that sequences of like length are called together."""

    @abstractmethod
    def unavailable(self, capability: tuple[int, int]) -> str | None:
        """Why the kernel cannot run on a GPU of this compute capability, whatever the tensors; None if it can."""

    @abstractmethod
    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        """The largest head dimension; `head_dim` is that of the call, where only some large ones are supported."""

    @abstractmethod
    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [T, Hq, D], and lse float32 [Hq, T], natural logarithm."""

    @abstractmethod
    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        """Return the gradients of these rows, given out and lse of the whole attention.

        They have the same bits at every call where torch's switch for deterministic algorithms is on."""

    def unsupported(self, call: AttentionCall) -> str | None:
        q, alibi = call.q, call.slopes is not None
        if q.device.type != "cuda":
            return f"needs tensors on cuda, these are on {q.device}"
        if torch.version.hip is not None:
            return f"needs torch built for CUDA, this one is built for ROCm {torch.version.hip}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"needs float16 or bfloat16, these are {str(q.dtype).removeprefix('torch.')}"
        if call.softcap is not None and (alibi or not self.soft_caps):
            return ALIBI_OR_SOFT_CAP if self.soft_caps else "has no soft-capping, or none in backward"
        capability = torch.cuda.get_device_capability(q.device)
        head_dim, value_dim = q.shape[-1], call.v.shape[-1]
        dims = (head_dim, value_dim) if self.value_dims else (max(head_dim, value_dim),)
        unfit = (self.unfit_head_dim(dim, capability, alibi) for dim in dims)
        return self.unavailable(capability) or next(filter(None, unfit), None)

    def unfit_head_dim(self, head_dim: int, capability: tuple[int, int], alibi: bool = False) -> str | None:
        """Why heads of this size cannot run on a GPU of this compute capability; None if they can."""
        dims = head_dim + ALIBI_DIMS * alibi
        limit = self.max_head_dim(capability, dims)
        if dims % 8 == 0 and dims <= limit:
            return None
        dimension = f"{head_dim}, and ALiBi takes {ALIBI_DIMS} more" if alibi else f"{head_dim}"
        return f"needs a head dimension that is a multiple of 8 up to {limit}, this one is {dimension}"

    def calls(self, blocks: Sequence[Block], q_rows: int, k_rows: int) -> Iterator[list[Block]]:
        """Blocks of one mask that go into one call each."""
        return calls_of(blocks, q_rows, k_rows)

    def backward_calls(self, blocks: Sequence[Block], q_rows: int, k_rows: int) -> Iterator[list[Block]]:
        """Blocks that go into one call of backward each: those of `calls`, by classes of length where the kernel wants that."""
        for call in self.calls(blocks, q_rows, k_rows):
            if self.sums_parts and torch.are_deterministic_algorithms_enabled():
                yield from length_classes(call)
            else:
                yield call

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        q, k, v, blocks, scale, _, slopes, softcap = call
        for sequences, q_runs, k_runs, all_queries, all_keys in self._laid_out(blocks, q, k):
            queries = q if all_queries else _gather(q, q_runs)
            rows = (queries, k, v) if all_keys else (queries, _gather(k, k_runs), _gather(v, k_runs))
            if slopes is None:
                out, lse = self.run_forward(VarlenCall(*rows, sequences, scale, None, softcap))
            elif self._has_alibi(sequences):
                out, lse = self.run_forward(VarlenCall(*rows, sequences, scale, slopes))
                lse = lse - slopes.unsqueeze(1) * sequences.queries.spread(sequences.distances)
            else:
                out, lse = self.run_forward(VarlenCall(*_folded(rows, sequences, scale, slopes), sequences, scale))
                out, lse = out[..., : v.shape[-1]].contiguous(), lse + _fold_shift(sequences, slopes)
            run, *more = q_runs
            if not more:
                yield Partial(*run, out, lse)
                continue
            row = 0
            for start, stop in q_runs:
                yield Partial(start, stop, out[row : row + stop - start], lse[:, row : row + stop - start])
                row += stop - start

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        q, k, v, blocks, scale, _, slopes, softcap = call
        for sequences, q_runs, k_runs, all_queries, all_keys in self._laid_out(blocks, q, k, backward=True):
            queries, d_out, o, row_lse = q, grad_out, out, lse
            if not all_queries:
                queries, d_out, o = _gather(q, q_runs), _gather(grad_out, q_runs), _gather(out, q_runs)
                row_lse = _gather(lse.t(), q_runs).t()
            rows = (queries, k, v) if all_keys else (queries, _gather(k, k_runs), _gather(v, k_runs))
            native = None
            if slopes is not None and self._has_alibi(sequences):
                native = slopes
                row_lse = row_lse + slopes.unsqueeze(1) * sequences.queries.spread(sequences.distances)
            elif slopes is not None:
                rows = _folded(rows, sequences, scale, slopes)
                d_out, o = with_dims(d_out), with_dims(o)
                row_lse = row_lse - _fold_shift(sequences, slopes)
            varlen = VarlenCall(*rows, sequences, scale, native, softcap)
            added = self.run_backward(varlen, d_out, o, row_lse.contiguous())
            for total, rows_added, x, runs in zip(gradients, added, (q, k, v), (q_runs, k_runs, k_runs)):
                run, *more = runs
                if not more and rows_added.shape[2] == x.shape[2]:
                    total.add(*run, rows_added.contiguous())
                    continue
                row = 0
                for start, stop in runs:
                    total.add(start, stop, rows_added[row : row + stop - start, :, : x.shape[-1]].contiguous())
                    row += stop - start

    def _laid_out(
        self, blocks: Sequence[Block], q: torch.Tensor, k: torch.Tensor, backward: bool = False
    ) -> "list[_Call]":
        """The calls for these blocks. Blocks of a schedule keep them: they are the same in every layer, and in its
        recomputation."""
        kept = blocks.derived if isinstance(blocks, Blocks) else {}
        q_rows, k_rows = q.shape[0], k.shape[0]
        by_length = backward and self.sums_parts and torch.are_deterministic_algorithms_enabled()
        key = (self, q_rows, k_rows, q.device, backward, by_length)
        if key not in kept:
            calls = self.backward_calls if backward else self.calls
            busy = isinstance(blocks, Blocks) and blocks.in_flight[backward]
            kept[key] = [_laid_out(call, q_rows, k_rows, q.device, busy) for call in calls(blocks, q_rows, k_rows)]
        return kept[key]

    def _has_alibi(self, sequences: Sequences) -> bool:
        return self.exact_causal_alibi and sequences.mask is Mask.CAUSAL


def calls_of(blocks: Sequence[Block], q_rows: int, k_rows: int) -> Iterator[list[Block]]:
    """Blocks grouped by mask, in order; of each call, query rows and key rows are at most twice q_rows and k_rows."""
    for mask in Mask:
        call: list[Block] = []
        queries = keys = 0
        for block in (b for b in blocks if b.mask is mask):
            queries += block.q_stop - block.q_start
            keys += block.k_stop - block.k_start
            if call and (queries > 2 * q_rows or keys > 2 * k_rows):
                yield call
                call, queries, keys = [], block.q_stop - block.q_start, block.k_stop - block.k_start
            call.append(block)
        if call:
            yield call


def length_classes(call: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks of a call by the power of two that their longer side reaches, in order within each."""
    classes: dict[int, list[Block]] = {}
    for block in call:
        longer = max(block.q_stop - block.q_start, block.k_stop - block.k_start)
        classes.setdefault(longer.bit_length(), []).append(block)
    yield from classes.values()


class _Call(NamedTuple):
    """One call of the kernel."""

    sequences: Sequences
    q_runs: Runs
    """of query rows, in order; runs that touch are one"""
    k_runs: Runs
    """of key rows"""
    all_queries: bool
    """whether they are all rows that there are"""
    all_keys: bool


def _laid_out(
    blocks: Sequence[Block], q_rows: int, k_rows: int, device: torch.device, beside_messages: bool = False
) -> _Call:
    """Lay out one call for blocks of tensors of so many rows."""
    q_runs = [(b.q_start, b.q_stop) for b in blocks]
    k_runs = [(b.k_start, b.k_stop) for b in blocks]
    lengths = [[stop - start for start, stop in runs] for runs in (q_runs, k_runs)]
    starts = [list(accumulate(of_runs, initial=0)) for of_runs in lengths]
    # One transfer for all three, whatever the number of blocks.
    integers = torch.tensor([*starts, [*(b.distance for b in blocks), 0]], dtype=torch.int32)
    cu_q, cu_k, distances = on_device(integers, device).unbind()
    queries = Rows(cu_q, starts[0][-1], max(lengths[0]))
    keys = Rows(cu_k, starts[1][-1], max(lengths[1]))
    sequences = Sequences(blocks[0].mask, queries, keys, distances[:-1], beside_messages)
    q_runs, k_runs = list(_joined(q_runs)), list(_joined(k_runs))
    return _Call(sequences, q_runs, k_runs, q_runs == [(0, q_rows)], k_runs == [(0, k_rows)])


def _folded(rows: Triple, sequences: Sequences, scale: float, slopes: torch.Tensor) -> Triple:
    """q and k with the bias of ALiBi in eight more dimensions."""
    q, k, v = rows
    queries, keys = query_dims(slopes, scale, q.dtype), key_dims(sequences.keys, k.dtype)
    return with_dims(q, queries), with_dims(k, keys), with_dims(v)


def _fold_shift(sequences: Sequences, slopes: torch.Tensor) -> torch.Tensor:
    return lse_shift(slopes, sequences.queries, sequences.keys, sequences.distances)


def _joined(runs: Runs) -> Runs:
    """Runs with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _gather(x: torch.Tensor, runs: Runs) -> torch.Tensor:
    """The rows of x in the order of the runs; a view where they are one run."""
    (start, stop), *more = runs
    if not more:
        return x[start:stop]
    return torch.cat([x[start:stop] for start, stop in runs])
