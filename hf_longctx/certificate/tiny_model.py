"""A random model of a tiny configuration, the same in every process.

Building a model draws its weights from the global random state; here that state is put aside, set, and put back. Afterwards every
parameter is drawn again from a generator of its own, since the usual initialisation (std 0.02) leaves attention next to
uniform and activations that fade from layer to layer:

    weights that the class begins around zero    normal, with standard deviation 1 / sqrt(fan in): outputs are as large as inputs
    parameters that it begins elsewhere          its own value + 0.1 * normal: gains of norms around 1, decays of state layers, D

so that a gradient reaches each of them and none is at a special point, such as a gain of exactly 1 or a bias of 0.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

MEMORY_LIMIT = 2 * 2**30
"""Bytes that a copy's weights may take in float64."""
NOISE = 0.1
"""Standard deviation of what is added to parameters that do not begin around zero, and to biases."""


def causal_lm_class(config: Any) -> type:
    """Returns transformers' class of causal language models for `config`.

    Raises ValueError for configurations that transformers has no such class for (custom code among them): pass the class then.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    if type(config) not in CLASSES:
        raise ValueError(
            f"transformers has no causal language model for {type(config).__name__} (model_type={config.model_type!r}); "
            "pass the model's class, such as cls=type(model)"
        )
    classes: Any = CLASSES[type(config)]
    return classes[0] if isinstance(classes, (list, tuple)) else classes


def own_configuration(cls: type, config: Any) -> Any:
    """Returns `config`, or the part of it that `cls` is a model of: some classes are the text model of a larger configuration."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    parts = [vars(config)[name] for name, part in config.sub_configs.items() if part is wanted]
    return parts[0] if parts else config


def empty_model(config: Any, cls: type | None = None) -> torch.nn.Module:
    """Returns a model on the meta device: modules and shapes without memory. `config` stays as it is.

    Weights are not initialised, for which transformers replaces functions of torch.nn.init for a while: no other thread must
    build a model meanwhile.
    """
    from transformers.initialization import meta_device_safe_creation_ops, no_init_weights

    cls = cls or causal_lm_class(config)
    config = own_configuration(cls, config)
    with torch.device("meta"), no_init_weights(), meta_device_safe_creation_ops():
        return cls(copy.deepcopy(config))


def tiny_model(
    config: Any,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    cls: type | None = None,
    attn_implementation: str | None = "eager",
) -> Any:
    """Returns a random model of `config` on CPU, in training mode, whose weights depend on `seed` alone.

    `cls` is the model's class; without it, transformers' own causal language model of that configuration. `config` stays as it
    is: the model has a copy, with its implementation of attention and of experts ("eager", which every device and dtype has).
    The global random state is the same afterwards, but other threads must not draw from it, or build models, meanwhile.

    Raises MemoryError if the weights would take more than MEMORY_LIMIT, ValueError as `causal_lm_class` does, and what the
    class raises.
    """
    cls = cls or causal_lm_class(config)
    size = sum(parameter.numel() for parameter in empty_model(config, cls).parameters())
    if size * 8 > MEMORY_LIMIT:
        raise MemoryError(
            f"{size / 1e6:,.0f}M parameters take {size * 8 / 2**30:.1f} GiB in float64, over {MEMORY_LIMIT / 2**30:.0f} GiB"
        )
    config = copy.deepcopy(own_configuration(cls, config))
    arguments: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    with _own_random_state(seed):
        model = cls._from_config(config, **arguments)  # type: ignore[attr-defined]
    model = model.to(dtype)  # parameters that the class keeps in float32
    seed_weights(model, seed)
    return model.train()


def seed_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Draws every floating-point parameter anew, in place, as the head of this module describes, and the biases of routers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            begun = parameter.detach().double()
            around_zero = (
                not begun.isfinite().all() or abs(begun.mean()) <= 0.5 * begun.std(correction=0) or not begun.any()
            )
            if parameter.dim() > 1 and around_zero:
                parameter.copy_(drawn * _fan_in(parameter) ** -0.5)
            else:
                parameter.copy_((0 if not begun.isfinite().all() else begun) + NOISE * drawn)
        for name, buffer in model.named_buffers():
            if _is_bias_of_router(name, buffer):
                buffer.add_(NOISE * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


def _is_bias_of_router(name: str, buffer: torch.Tensor) -> bool:
    """True for what routers add to their scores: no parameter, and zeros at first, but not in a trained model."""
    return name.endswith("bias") and buffer.is_floating_point() and buffer.dim() == 1


def _fan_in(parameter: torch.Tensor) -> int:
    """Inputs of an output: those of a matrix [out, in] and of a convolution [out, in / groups, width]. Stacks of matrices,
    such as experts [E, ., .], are as wide as their last dimension or about so."""
    if parameter.dim() == 3 and parameter.shape[-1] <= 8:
        return max(1, parameter.shape[1] * parameter.shape[2])
    return max(1, parameter.shape[-1])


@contextlib.contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield
