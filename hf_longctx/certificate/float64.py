"""Keeps a computation in float64 where modeling code asks for float32.

Modeling code computes norms, softmax, routers, rotary angles and states in float32 whatever the model's dtype: `x.float()`,
`x.to(torch.float32)`, `softmax(scores, dtype=torch.float32)`, `torch.zeros(n, dtype=torch.float32)`. In a float64 model these
round to 1e-7, which hides errors smaller than that. Within `float64_throughout()` such calls give float64 instead, and so does
what would be float32 by default: `torch.tensor(0.1)`, `position_ids / 8192`.

It is a mode of torch's functions, and those are kept by thread: each thread that computes enters its own. It lasts through
`backward` on CPU, which runs in the calling thread; backward of CUDA tensors runs in autograd's own threads and follows the
dtypes of the forward.

Out of its reach:

- code that casts outside of Python: kernels (flash-attn, fla, mamba-ssm, Triton) and torch.jit.script;
- tensors that are float32 already, such as a parameter, and what is computed from these alone. `tiny_model` converts those of a
  model; its RoPE frequencies were computed in float32 then, the same for all who use the model;
- numbers that leave torch (`.tolist()`, numpy) and come back.

`narrowed` counts, by name, the calls that gave float32 or less although an argument was float64.
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
"""Dtype that is asked for -> that is given."""
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
"""Methods that are named after a dtype."""
LIKE = (torch.Tensor.type_as, torch.Tensor.to)
"""Methods that take the dtype from another tensor."""
MAKERS = (torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace, torch.logspace, torch.rand, torch.randn)
"""Makers of tensors of the default dtype, unless one is given."""
FROM_NUMBERS = (torch.tensor, torch.full, torch.arange)
"""Makers of tensors of the default dtype if they are given a number with a fraction, of integers otherwise."""


class Float64(TorchFunctionMode):
    """The mode of `float64_throughout`."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowed: Counter[str] = Counter()
        """Operation -> calls that gave narrower floating-point numbers than float64 although an argument was float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors(args)
        if func in CASTS:
            return _wide(args[0])
        if (
            func in LIKE
            and len(args) > 1
            and isinstance(args[1], torch.Tensor)
            and args[1].dtype in WIDER
            and args[0].dtype not in WIDER
        ):
            return _wide(args[0]).to(args[1].device)
        if kwargs.get("dtype") is None and (
            func in MAKERS or (func in FROM_NUMBERS and _has_fraction((args, *kwargs.values())))
        ):
            kwargs["dtype"] = torch.float64
        if kwargs.get("dtype") in WIDER:
            kwargs["dtype"] = WIDER[kwargs["dtype"]]
        args = tuple(WIDER.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype not in WIDER:
            return result
        if tensors and not any(t.is_floating_point() or t.is_complex() for t in tensors) and "out" not in kwargs:
            # Integers that become the default dtype: once more, with integers that float64 holds exactly.
            return func(*(_wide(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        if any(t.dtype in (torch.float64, torch.complex128) for t in tensors):
            self.narrowed[getattr(func, "__name__", str(func))] += 1
        return result


def _tensors(args: Any) -> list[torch.Tensor]:
    """Returns the tensors among arguments, and those in lists of them, as of torch.cat."""
    tensors = []
    for argument in args:
        tensors += [
            a for a in (argument if isinstance(argument, (list, tuple)) else [argument]) if isinstance(a, torch.Tensor)
        ]
    return tensors


def _has_fraction(value: Any) -> bool:
    """True for a float, and for nested lists with one."""
    return isinstance(value, float) or (isinstance(value, (list, tuple)) and any(map(_has_fraction, value)))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as float64, or complex128; itself if it is that already."""
    return tensor if tensor.is_complex() else tensor.to(torch.float64)


@contextmanager
def float64_throughout() -> Iterator[Float64]:
    """Computes in float64, in this thread, wherever Python code asks for a narrower floating-point dtype or leaves it open.

    Gives the mode, whose `narrowed` says after the computation which operations gave narrower numbers all the same.
    """
    with Float64() as mode:
        yield mode
