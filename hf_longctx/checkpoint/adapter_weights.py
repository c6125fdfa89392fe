"""The weights of a checkpoint beside a model that stays as it is: what PEFT trains, and what its methods need besides.

Most methods keep all that they are in parameters that are trained. Some share one among layers, which has a name in each of
them, or keep projections as buffers:

    base_model.vera_A.default                                     a buffer, without which PEFT refuses to save or to load
    base_model.vblora_vector_bank.default                         trained; PEFT asks for it by this name
    base_model.model...q_proj.vblora_vector_bank.default          the same tensor

A checkpoint holds each tensor once, by its first name; PEFT's own file is written with all names at hand. Of the model that stays
as it is it keeps hashes of a few values, so that its adapters do not go on upon another one. Nothing is sent.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hf_longctx.checkpoint.export import as_peft_saves

SAMPLED_WEIGHTS, SAMPLED_VALUES = 12, 16
"""How many weights under adapters are told apart, in the order of the model, and by how many values: its first layer's, which the
first process has in any sharding and any number of stages, from their first value on."""


def has_adapters(model: Any) -> bool:
    """Whether PEFT trains something beside a model that stays as it is."""
    return bool(getattr(model, "peft_config", None))


def adapter_weights(
    model: Any, elsewhere: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return name -> what is trained, and the buffers of adapters that go with it, each once: of this process, and of what other
    stages of a pipeline have (`elsewhere`)."""
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    others = {name: weight for name, weight in elsewhere.items() if weight.requires_grad}
    adapters = trained_adapters(model, [*own, *others])
    own |= {name: buffer for name, buffer in _saved_buffers(model) if _is_of(adapters, name)}
    others |= {
        name: buffer
        for name, buffer in elsewhere.items()
        if not isinstance(buffer, Parameter) and _is_of(adapters, name)
    }
    first = second_names(as_peft_saves(model))  # of the whole model: the same on all stages
    own = {first.get(name, name): tensor for name, tensor in own.items()}
    others = {first.get(name, name): tensor for name, tensor in others.items()}
    return own, {name: tensor for name, tensor in others.items() if name not in own}


def trained_adapters(model: Any, names: Collection[str]) -> list[str]:
    """Return the adapters that weights of these names belong to."""
    return [adapter for adapter in model.peft_config if any(_is_of([adapter], name) for name in names)]


def base_sample(model: Any) -> dict[str, str] | None:
    """Hash the first values of some weights that adapters stand on, as the first process has them; None: there are no adapters.

    Packed weights are left out, and those under adapters whose initialisation changes them (PiSSA, OLoRA): either may differ in
    the last digit on another device."""
    if not has_adapters(model):
        return None
    changes_base = any(isinstance(getattr(of, "init_lora_weights", None), str) for of in model.peft_config.values())
    sample: dict[str, str] = {}
    for name, weight in model.named_parameters():
        parts = name.split(".")
        left_out = weight.requires_grad or weight.is_meta or not weight.is_floating_point()
        if left_out or model.peft_config.keys() & set(parts) or (changes_base and "base_layer" in parts):
            continue
        values: torch.Tensor = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
        if not values.ndim or values.shape[-1] < SAMPLED_VALUES:  # a part of a row may end before
            continue
        first = values.flatten()[:SAMPLED_VALUES].to("cpu", torch.float64).numpy().tobytes()
        sample[name] = hashlib.blake2b(first, digest_size=4).hexdigest()
        if len(sample) == SAMPLED_WEIGHTS:
            break
    return sample


def second_names(model: Any) -> dict[str, str]:
    """Return the other names of shared weights and buffers -> the first one, which a checkpoint has."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *_saved_buffers(model)]
    return {name: before for name, tensor in named if (before := first.setdefault(id(tensor), name)) != name}


def by_all_names(whole: Mapping[str, torch.Tensor], shared: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return weights and buffers under all their names, second ones (`second_names`) included, as PEFT asks for them."""
    return dict(whole) | {name: whole[first] for name, first in shared.items() if first in whole}


def refuse_what_peft_cannot_save(model: Any, whole: Mapping[str, torch.Tensor]) -> None:
    """Let PEFT look for all that it saves of a whole model, without memory; raises whatever PEFT raises.

    Args:
        whole: name -> what a checkpoint holds.
    """
    from peft import get_peft_model_state_dict

    without_memory = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in whole.items()
    }
    state = by_all_names(without_memory, second_names(model))
    for adapter in trained_adapters(model, whole.keys()):
        get_peft_model_state_dict(model, state, adapter, save_embedding_layers=False)


def without_hooks(model: Any) -> Any:
    """Return a model of the same parameters and settings whose modules are others, and run no hook. A thread may look through it
    while training goes on: FSDP2 puts weights in parts whenever a module is asked for its state, in the middle of a step too."""
    twins: dict[int, Any] = {}
    for module in model.modules():
        twin = twins[id(module)] = object.__new__(type(module))
        twin.__dict__ = module.__dict__ | {"_parameters": dict(module._parameters)}
        twin.__dict__ |= {name: OrderedDict() for name in ("_state_dict_hooks", "_state_dict_pre_hooks")}
    for twin in twins.values():
        twin.__dict__["_modules"] = {
            name: None if child is None else twins[id(child)] for name, child in twin._modules.items()
        }
    return twins[id(model)]


def _is_of(adapters: Collection[str], name: str) -> bool:
    """Tell whether a weight or buffer belongs to one of these adapters, whose name is a part of its own."""
    return any(f".{adapter}." in f"{name}." for adapter in adapters)


def _saved_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict has, under all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
