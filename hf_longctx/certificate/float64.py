"""Keeps a float64 computation in float64 where modeling code asks for float32.

Modeling code computes norms, softmax, routers, rotary angles and states in float32 whatever the model's dtype: `x.float()`,
`x.to(torch.float32)`, `softmax(scores, dtype=torch.float32)`, `torch.zeros(..., dtype=torch.float32)`. In a float64 model
these round to 1e-7, which hides errors smaller than that. Within `float64_throughout()` such calls give float64 instead.

It is a mode of torch's functions, which is kept by thread: each thread that computes enters its own. It lasts through
`backward` on CPU, which runs in the calling thread; backward of CUDA tensors, in autograd's own thread, follows the dtypes of
the forward.

Out of its reach:
- kernels and scripted functions that cast inside (flash-attn, fla, mamba-ssm, Triton, torch.jit.script);
- tensors that were float32 before: buffers, parameters. `tiny_model` converts those of a model; a rope's frequencies were
computed in
  float32 then, the same for all who use the model;
- a float32 result of an operation that is not among the casts above. `narrowed` counts those, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
"""Dtypes that are asked for -> those that are given."""
CASTS = {
    torch.Tensor.float: torch.float64,
    torch.Tensor.half: torch.float64,
    torch.Tensor.bfloat16: torch.float64,
}
LIKE = (torch.Tensor.type_as, torch.Tensor.to)
"""Functions that take a dtype from another tensor."""
FACTORIES = (
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.eye,
    torch.linspace,
    torch.logspace,
    torch.rand,
    torch.randn,
)
"""Functions that make a tensor of the default dtype unless told otherwise."""


class Float64(TorchFunctionMode):
    """The mode of `float64_throughout`."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowed: Counter[str] = Counter()
        """Operation -> calls that gave narrower floating-point numbers than float64 although an argument was float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = _has_float64(args)
        if func in CASTS and wide:
            return args[0] if args[0].dtype in (torch.float64, torch.complex128) else args[0].to(CASTS[func])
        if kwargs.get("dtype") in WIDER:
            kwargs["dtype"] = WIDER[kwargs["dtype"]]
        elif (
            func in FACTORIES
            and kwargs.get("dtype") is None
            and torch.get_default_dtype() in WIDER
            and not _integers(func, args)
        ):
            kwargs["dtype"] = torch.float64
        args = tuple(WIDER.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        if func in LIKE and wide and len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dtype in WIDER:
            result = args[0].to(args[1].device)
        else:
            result = func(*args, **kwargs)
        if wide and isinstance(result, torch.Tensor) and result.dtype in WIDER:
            self.narrowed[getattr(func, "__name__", str(func))] += 1
        return result


def _has_float64(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype in (torch.float64, torch.complex128) for a in args)


def _integers(func: Any, args: Any) -> bool:
    """`torch.full((2,), 0)` is int64, `torch.full((2,), 0.0)` is not."""
    return func is torch.full and len(args) > 1 and isinstance(args[1], (bool, int))


@contextmanager
def float64_throughout() -> Iterator[Float64]:
    """Computes in float64 in this thread wherever Python code asks for a narrower floating-point dtype.

    Gives the mode, whose `narrowed` says after the computation which operations gave narrower numbers all the same.
    """
    with Float64() as mode:
        yield mode
