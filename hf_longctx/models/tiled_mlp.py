"""The MLP of a layer, some tokens at a time: its inner activations, of which a long document has gigabytes, exist for one
tile only.

    forward    out[tile] = mlp(x[tile])                               nothing but x is saved
    backward   mlp(x[tile]) again, then its gradients; those of the weights are summed over tiles in float32

An MLP treats tokens alone, so that results are those of one call, up to the rounding of sums over tokens. x is saved
*before* the MLP runs: a layer that activation checkpointing recomputes stops there, so that the MLP runs twice in all, as
it would without tiles. Dropout repeats its random numbers. Weights are inputs of the autograd function, and their
gradients leave by its outputs: what waits for them (DDP, FSDP2) sees one gradient.

What is an MLP is found by what it is made of: matrices, activations and dropout, behind a forward of one tensor. Experts are
found by their forward: hidden states, the experts of each token, and their weights. These are tiled after routing: the
router sees all tokens at once. Where experts lie on several ranks they are not, because each tile would be a meeting of ranks
that hold different numbers of them.

Source: ALST (arXiv 2506.13996), TiledMLP. Shapes: T tokens, H hidden. Nothing is sent between ranks here.
"""

import inspect
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.pytorch_utils import Conv1D

from hf_longctx.attention.kernels.accumulate import accumulation_dtype

Run = Callable[..., torch.Tensor]
"""(module, *tensors) -> what the module gives for them."""


MLP_NAMES = ("mlp", "feedforward", "ffn")
"""One of them is in the name of an MLP's class."""


def runs_in_tiles(module: torch.nn.Module) -> bool:
    """Return whether a module computes each token by itself: an MLP, or the experts of a mixture."""
    name = type(module).__name__.lower()
    arguments = [p for p in inspect.signature(type(module).forward).parameters if p != "self"]
    if name.endswith("experts"):
        return len(arguments) == 3 and arguments[0] == "hidden_states"
    if len(arguments) != 1 or not any(word in name for word in MLP_NAMES):
        return False
    matrices = 0
    for part in module.modules():
        if isinstance(part, (torch.nn.Linear, Conv1D)):
            matrices += 1
        elif (
            next(part.parameters(recurse=False), None) is not None
            or next(part.buffers(recurse=False), None) is not None
        ):
            return False
    return matrices > 1


def own_forward(module: torch.nn.Module, *tensors: torch.Tensor) -> torch.Tensor:
    """Return that of the module's class."""
    return type(module).forward(module, *tensors)


class MlpForward:
    """An MLP's forward on this instance: `run`, in tiles where there are more tokens than in one.

    An object and not a bound function, which a copy or a pickle of the module would tie to the wrong one.
    """

    def __init__(self, module: torch.nn.Module, run: Run, tile_tokens: int) -> None:
        """tile_tokens: 0 for one tile of all tokens."""
        self._module, self._run, self._tile_tokens = module, run, tile_tokens

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Tensors [..., T, features] -> [..., T, H]."""
        tokens = tensors[0].shape[-2]
        if not self._tile_tokens or tokens <= self._tile_tokens:
            return self._run(self._module, *tensors)
        spans = [(start, min(self._tile_tokens, tokens - start)) for start in range(0, tokens, self._tile_tokens)]
        trained = _trained(self._module)
        if not torch.is_grad_enabled() or not any(argument.requires_grad for argument in (*tensors, *trained)):
            return _all_tiles(self._module, self._run, spans, tensors)
        anchor = torch.empty(0, requires_grad=True)  # so that inputs are saved also where only weights have gradients
        marked = _Inputs.apply(anchor, *tensors)
        wanted = tuple(tensor.requires_grad for tensor in tensors)
        call = (self._module, self._run, spans, marked[0].grad_fn, wanted)
        return _Tiles.apply(call, *marked, *trained)


class _Inputs(torch.autograd.Function):
    """Saves tensors and returns them."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, *tensors: torch.Tensor):
        ctx.save_for_backward(*tensors)
        views = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(view for view in views if not view.is_floating_point()))
        return views

    @staticmethod
    def backward(ctx, *gradients):
        return None, *gradients


class _Tiles(torch.autograd.Function):
    """The tensors that `_Inputs` has saved, and the trained parameters -> the MLP's output."""

    @staticmethod
    def forward(ctx, call, *tensors: torch.Tensor):
        module, run, spans, _, wanted = call
        inputs = tensors[: len(wanted)]
        device = inputs[0].device.type
        ctx.call, ctx.random = call, (torch.get_rng_state(), *get_device_states(*inputs))
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        out = _all_tiles(module, run, spans, inputs)
        if ctx.autocast[-1]:
            torch.clear_autocast_cache()  # weights were cast without a graph, which others must not get
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        module, run, spans, saved, wanted = ctx.call
        inputs, parameters = saved.saved_tensors, _trained(module)
        gradients = [torch.empty_like(tensor) if want else None for tensor, want in zip(inputs, wanted)]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        cpu, devices, states = ctx.random
        device, dtype, enabled = ctx.autocast
        with (
            torch.random.fork_rng(devices, device_type=device if device != "cpu" else "cuda"),
            torch.autocast(device, dtype, enabled),
        ):
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=device)
            for start, length in spans:
                tile = [tensor.narrow(-2, start, length).detach() for tensor in inputs]
                for part, want in zip(tile, wanted):
                    part.requires_grad_(want)
                with torch.enable_grad():
                    out = run(module, *tile)
                targets = [part for part, want in zip(tile, wanted) if want]
                tile_gradients = torch.autograd.grad(
                    out, [*targets, *parameters], grad_out.narrow(-2, start, length), allow_unused=True
                )
                for target, gradient in zip([kept for kept in gradients if kept is not None], tile_gradients):
                    target.narrow(-2, start, length).copy_(gradient)
                _add(sums, tile_gradients[len(targets) :])
        of_weights = [
            None if total is None else total.to(parameter.dtype) for total, parameter in zip(sums, parameters)
        ]
        return None, *gradients, *of_weights


def _all_tiles(
    module: torch.nn.Module, run: Run, spans: list[tuple[int, int]], tensors: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """(start, length) of each tile in spans."""
    out: torch.Tensor | None = None
    for start, length in spans:
        part = run(module, *(tensor.narrow(-2, start, length) for tensor in tensors))
        if out is None:
            out = part.new_empty((*part.shape[:-2], tensors[0].shape[-2], part.shape[-1]))
        out.narrow(-2, start, length).copy_(part)
        del part  # or it would be there while the next one is computed
    assert out is not None
    return out


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _add(sums: list[torch.Tensor | None], gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Adds the gradients of a tile."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        total = sums[index]
        sums[index] = gradient.to(accumulation_dtype(gradient.dtype)) if total is None else total.add_(gradient)
