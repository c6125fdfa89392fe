"""How a layout reaches the attention layers of any model: the attention mask carries it.

Nearly every decoder makes its masks with transformers' masking_utils and hands them to every attention layer, whatever other
keywords its layers forget. While the base model runs over a layout (`running`), our mask function returns a LayoutMask in
place of a mask: a tensor [1, 1, T, T] without memory that holds the call, and what the mask would have said. So nothing here
knows a family.

    model(..., layout=...) -> running(call): base model -> masking_utils -> our mask function -> LayoutMask
                                                -> decoder layer -> attention layer -> longctx_attention_forward(..., LayoutMask)

What a mask says is asked, not assumed: its function of positions is called with a few pairs of query and key, and must answer as
a causal mask, a window or chunks would. Whoever computes with a LayoutMask is refused by name: a model that chooses keys by
itself. Backward may recompute a layer in another thread, where a context variable is unset: a mask is an argument of the layer,
and what is recomputed enters the call again.

Shapes: T tokens of this rank's shard.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from hf_longctx.attention.earlier import EarlierChunks
from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.layouts.layout import Layout


class CollectedKeys:
    """Receives a shard's keys and values of each layer. No dictionary: FSDP2 copies those among a layer's arguments."""

    def __init__(self) -> None:
        self.of_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """layer_idx -> keys and values, both [T, Hkv, D], D not always the same"""


@dataclass(frozen=True, eq=False)
class LayoutCall:
    """Arguments that a base model was called with, for its attention layers."""

    layout: Layout
    exchange: Exchange | None = None
    kernel: str = "auto"
    """Name of the attention kernel; see `hf_longctx.attention.kernels.select_kernel`."""
    keep_last_slice: bool = False
    """Whether backward starts from the slice of keys and values that forward received last."""
    positions: torch.Tensor | None = None
    """int64 [1, T], which the base model was given."""
    collect: CollectedKeys | None = None
    keep_attention: KeptAttention | None = None
    """With activation checkpointing, holds a layer's attention for its recomputation."""
    earlier: EarlierChunks | None = None
    """For a chunk of a document, the keys and values of the chunks before it; keeps this one's."""
    seen: list[str] = field(default_factory=list)
    """Classes of the attention layers that have received this call, in order."""

    @property
    def tokens(self) -> int:
        """Return the rows of this rank's shard."""
        return self.layout.tokens(own_rank(self.layout, self.exchange))


@dataclass(frozen=True)
class Pattern:
    """The keys that a query sees: one at position i sees positions j <= i, less what the fields leave out."""

    window: int | None = None
    """None, or only positions j > i - window are seen."""
    chunk: int | None = None
    """None, or only positions with j // chunk == i // chunk are seen."""


_CALL: ContextVar[LayoutCall | None] = ContextVar("layout_call")
"""None where a model runs without a layout, and says so; unset in the threads of autograd, and wherever nobody says anything."""

_UNSAID: Any = object()

READ_ONLY = frozenset(
    {
        "__get__",
        "__len__",
        "__repr__",
        "dim",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "ndimension",
        "numel",
        "size",
        "stride",
    }
)
"""Functions of torch that look at a mask without reading its values."""
THE_SAME = frozenset(
    {"__deepcopy__", "__set__", "bool", "clone", "contiguous", "detach", "requires_grad_", "to", "type", "type_as"}
)
"""Those after which a mask is what it was."""


class LayoutMask(torch.Tensor):
    """A bool tensor [1, 1, T, T] that takes no memory, and stands for the mask of a layout."""

    call: LayoutCall
    pattern: Pattern | None
    """Meaning of the mask; None for one that cannot be used."""
    unusable: str = ""
    """Why it cannot be used."""

    @classmethod
    def of(cls, call: LayoutCall, pattern: Pattern | None, device: Any = None, unusable: str = "") -> "LayoutMask":
        """Make the mask of a call."""
        row = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        mask = row.expand(1, 1, call.tokens, call.tokens).as_subclass(cls)
        mask.call, mask.pattern, mask.unusable = call, pattern, unusable
        return mask

    def keeping(self, kept: KeptAttention) -> "LayoutMask":
        """Return this mask for a layer whose attention is kept."""
        return LayoutMask.of(replace(self.call, keep_attention=kept), self.pattern, self.device, self.unusable)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in THE_SAME:
            return args[0]
        if name in READ_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ValueError(
            f"the model computes with its attention mask (torch function {name!r}), so its own code decides which keys a query "
            "sees: over a layout, the mask is a stand-in that holds no values. Valid: a model whose attention goes through "
            "transformers' attention interface with the mask as masking_utils makes it"
        )


@contextlib.contextmanager
def running(call: LayoutCall | None) -> Iterator[None]:
    """Make the masks of this thread's models LayoutMasks of the call, if there is one, in the context."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


@contextlib.contextmanager
def recomputing_alike(model: torch.nn.Module) -> Iterator[None]:
    """Recompute checkpointed layers, in the context, as they were computed, in whatever thread: over the same call, or without
    one."""
    checkpointing = [part for part in model.modules() if "_gradient_checkpointing_func" in part.__dict__]
    before = [part.__dict__["_gradient_checkpointing_func"] for part in checkpointing]
    for part, run in zip(checkpointing, before):
        part.__dict__["_gradient_checkpointing_func"] = functools.partial(_run_alike, run)
    try:
        yield
    finally:
        for part, run in zip(checkpointing, before):
            part.__dict__["_gradient_checkpointing_func"] = run


def _run_alike(run: Callable[..., Any], function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    """Checkpoint a layer by `run`, which transformers calls with a partial of the layer that holds its keywords. The call is that
    of this moment: a layer that runs document by document has one for each."""
    call = current_call()
    if isinstance(function, functools.partial):
        function = functools.partial(_Within(call, function.func), *function.args, **function.keywords)
    else:
        function = _Within(call, function)
    return run(function, *inputs, **keywords)


@dataclass(frozen=True)
class _Within:
    call: LayoutCall | None
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with running(self.call):
            return self.function(*args, **kwargs)


def current_call() -> LayoutCall | None:
    """Return the call over a layout that runs in this thread, if one does."""
    return _CALL.get(None)


def is_call_known() -> bool:
    """Tell whether a forward in this thread has said that it runs over a layout, or that it does not."""
    return _CALL.get(_UNSAID) is not _UNSAID


def layout_mask(
    call: LayoutCall,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: Any = None,
    **ignored: Any,
) -> LayoutMask:
    """Make the mask of a call. Arguments are those of transformers' mask interface.

    A model may make masks that none of its layers uses, for attention to an encoder for instance: one that means something
    else is refused when it is used.

    Raises:
        ValueError: it is of another size than the shard.
    """
    if batch_size != 1 or q_length != call.tokens or kv_length != q_length:
        raise ValueError(
            f"the model makes a mask of {batch_size} x {q_length} queries and {kv_length} keys for a layout whose shard here has "
            f"{call.tokens} tokens: it adds tokens of its own, or uses a cache. Valid: input_ids [1, {call.tokens}] and "
            "use_cache=False"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        return LayoutMask.of(call, None, device, "a mask of padding came with a layout, whose documents are not padded")
    try:
        return LayoutMask.of(call, pattern_of(mask_function, local_size, q_length), device)
    except ValueError as error:
        return LayoutMask.of(call, None, device, str(error))


def pattern_of(mask_function: Callable[..., Any], local_size: int | None, rows: int) -> Pattern:
    """Return what a mask function of transformers means, by asking it about pairs of positions around the multiples of
    `local_size`; `rows`: of the call, for functions that have an entry for each.

    Raises:
        ValueError: it is neither causal, a window nor chunks.
    """
    size = local_size or 4
    asked = sorted({0, 1, 2, 3, *(k * size + offset for k in range(1, 4) for offset in (-1, 0, 1))})
    answers = None
    for points in (asked, [point for point in asked if point < rows]):
        with contextlib.suppress(IndexError):
            answers = _answers(mask_function, torch.tensor(points))
            break
    if answers is not None:
        key = torch.tensor(points)[None, :]
        query = key.T
        causal = key <= query
        candidates = {}
        if local_size:  # asked first: where a rank holds few rows, a window may look causal, and ranks must agree
            candidates[Pattern(window=local_size)] = causal & (key > query - local_size)
            candidates[Pattern(chunk=local_size)] = causal & (key // local_size == query // local_size)
        candidates[Pattern()] = causal
        for pattern, expected in candidates.items():
            if torch.equal(answers, expected):
                return pattern
    raise ValueError(
        "its mask is neither causal, a window nor chunks of positions (asked about a few pairs of query and key): over a layout, "
        "no other is computed"
    )


def _answers(mask_function: Callable[..., Any], points: torch.Tensor) -> torch.Tensor:
    """bool [points, points]: whether queries see keys."""
    zero = torch.zeros((), dtype=torch.long)
    with _OnCPU():
        answer = mask_function(zero, zero, points[:, None], points[None, :])
    if not isinstance(answer, torch.Tensor):
        return torch.full((len(points), len(points)), bool(answer))
    return answer.expand(len(points), len(points))


class _OnCPU(TorchFunctionMode):
    """Computes with copies on the CPU of all tensors. A mask function may hold some of the model's device: they do not go
    together with points on the CPU, and an entry that they lack is an IndexError here and ends the process on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def leave_packing_to_layouts() -> None:
    """Let masking_utils look for packed documents in the positions only where no layout says which documents there are."""
    find = masking_utils.find_packed_sequence_indices

    @functools.wraps(find)
    def find_without_layout(*args: Any, **kwargs: Any) -> Any:
        return None if current_call() is not None else find(*args, **kwargs)

    masking_utils.find_packed_sequence_indices = find_without_layout
