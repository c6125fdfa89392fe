"""Chooses what is trained of a model: LoRA adapters through PEFT, or all weights but frozen ones.

Every rank builds the same adapters and freezes the same parameters, so that all ranks agree on which gradients exist
and are summed; frozen weights have none. Nothing is sent here.

Adapters that act on each token alone leave any plan exact. Those that look along the row of tokens (virtual tokens
before it, an invocation string in it, gates of the whole row) would see neighbouring documents and other ranks'
boundaries: `refuse_row_adapters` names them. Dropout of LoRA's inputs is random per plan, so it is 0 by default.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_longctx.models.adapters.lora_keys import REFUSED_KEYS
from hf_longctx.models.stages import cut_of

NUMBER = re.compile(r"\.\d+\.")
"""A layer's number in the names of its weights."""
ALL_LINEAR = "all-linear"
"""Every linear layer but the output head. PEFT's own meaning depends on its version: lately it adds Mixtral's router and
experts, for which it makes a whole weight matrix of each expert in every forward."""
ORIGINAL = ".original_module."
"""Part of the name of a weight that PEFT keeps as it was, beside the copy that is trained."""
ROW_ADAPTERS = {
    **dict.fromkeys(
        ("ADAPTION_PROMPT", "POLY", "XLORA", "SHADOW", "LILY"),
        "looks at a whole row of tokens, which holds several documents and parts of documents",
    ),
    "PVERA": "draws at random for a whole row of tokens, which holds several documents and parts of documents",
    "ADALORA": "adds a term to the loss of every call, once for each micro-batch and each rank",
}
"""PEFT methods beside prompt learning whose result for a token, or loss, depends on more than this token: what each does."""
ON_WHOLE_WEIGHTS = {
    "use_dora": "PEFT takes norms of whole weights",
    "modules_to_save": "PEFT copies whole modules",
    "trainable_token_indices": "PEFT puts rows into whole embeddings",
}
"""Settings of LoRA that a model in parts cannot have -> why not."""
PLANS_DIFFER = ("velora_config", "monteclora_config", "kasa_config", "alora_invocation_tokens")
"""Settings of LoRA for which that holds too."""


def add_lora(
    model: Any,
    *,
    r: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    **settings: Any,
) -> Any:
    """Puts LoRA adapters (arXiv 2106.09685) on a model and freezes everything else.

    The adapters of a model in half precision are float32, so that small updates do not round away. They are drawn from
    torch's random state: seed all ranks alike. `all-linear` is attention and MLP of Llama and Mistral, and attention of
    Mixtral, whose router and experts are no linear layers.

    Args:
        model: a causal language model, patched or not.
        r: rank of the update, B A: [out, r] times [r, in].
        alpha: the update is scaled by alpha / r.
        dropout: probability that an input of A is dropped; above 0, plans differ by what they drop.
        target_modules: "all-linear", or names of modules (the end of a name is enough). The output head may be among them,
            before `patch_model`: the loss is then computed from what the wrapped head makes of a chunk of rows at a time.
        settings: other keys of PEFT's LoraConfig, but for REFUSED_KEYS; None leaves one at its default. Weights that are tied
            stay tied (ensure_weight_tying) where `modules_to_save` trains one of them, as they do by trainable_token_indices.

    Returns:
        The model in PEFT's wrapper, which saves adapters only (adapter_model.safetensors).

    Raises:
        ValueError: no module has such a name, no row of embeddings such a token id, a key that is refused, or one for which PEFT
            takes whole weights, on a model in parts.
    """
    from peft import LoraConfig, get_peft_model

    for key in settings.keys() & REFUSED_KEYS.keys():
        raise ValueError(f"{key} {REFUSED_KEYS[key]}")
    if isinstance(target_modules, str) and target_modules != ALL_LINEAR:
        raise ValueError(f"target_modules={target_modules!r} must be {ALL_LINEAR!r} or a list of names")
    given = {key: value for key, value in settings.items() if value is not None}
    names = [name for name, _ in model.named_modules() if name]
    head = model.get_output_embeddings()
    if isinstance(target_modules, str):
        linear = [
            name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
        ]
        targets = sorted({name.rsplit(".", 1)[-1] for name in linear})
    else:
        targets = list(target_modules)
    for target in [*targets, *given.get("modules_to_save", ())]:
        matched = [name for name in names if name == target or name.endswith(f".{target}")]  # as PEFT does
        _refuse_unmatched(target, matched, names, "module")
    _refuse_tokens(model, given.get("trainable_token_indices", ()))
    for reason in on_whole_weights(model, given):
        raise ValueError(reason)
    if "modules_to_save" in given and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        given.setdefault("ensure_weight_tying", True)
    keys: dict[str, Any] = {"lora_alpha": alpha, "lora_dropout": dropout, "target_modules": targets} | given
    return get_peft_model(model, LoraConfig(r=r, task_type="CAUSAL_LM", **keys))


def on_whole_weights(model: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    """Say which of these settings of LoRA a model that was loaded in parts cannot have, and why; a whole model can have all."""
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        return
    in_parts = "on a model that was loaded in parts (DistributedConfig)"
    valid = "or a whole model, which LongContextPlugin(sharding='zero3') spreads"
    for key, reason in ON_WHOLE_WEIGHTS.items():
        if given := settings.get(key):
            shown = repr(given)[:100]
            yield f"{key}={shown} {in_parts}: {reason}, of which each process has a part. Valid: adapters without it, {valid}"
    spread_over = getattr(getattr(model.config, "distributed_config", None), "ep_size", None) or 1
    if (given := settings.get("target_parameters")) and spread_over > 1:
        yield (
            f"target_parameters={repr(given)[:100]} {in_parts} with ep_size={spread_over}: PEFT adds to whole weights, and each "
            f"process computes with its own experts. Valid: DistributedConfig(fsdp_size=...) without ep_size, {valid}"
        )


def four_bit_weights(dtype: torch.dtype) -> Any:
    """QLoRA's (arXiv 2305.14314) way to hold frozen weights: `quantization_config=` of transformers' from_pretrained.

    NF4 with its scales quantised again, through bitsandbytes; the output head stays as it is. `dtype`: what products are
    computed in.

    Raises:
        ValueError: there is no CUDA device, or bitsandbytes is not installed.
    """
    missing = []
    if not torch.cuda.is_available():
        missing.append("a CUDA device, and torch sees none")
    if find_spec("bitsandbytes") is None:
        missing.append("the package bitsandbytes: pip install bitsandbytes")
    if missing:
        raise ValueError(f"load_in_4bit needs {'; and '.join(missing)}. Valid without: lora alone, dtype bfloat16")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,  # FSDP2 shards tensors of one dtype
    )


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freezes the parameters whose names match: they get no gradient and stay as they are.

    Args:
        model: whole, or some stages of one.
        patterns: names of parameters or of modules that hold them, with shell wildcards: `model.embed_tokens`,
            `model.layers.[0-3].*`, `*norm*`. Tied weights are one parameter with two names.

    Returns:
        Names of the frozen parameters.

    Raises:
        ValueError: a pattern matches nothing (near names are given), or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cut = cut_of(model)
    if cut is not None:  # all stages of a pipeline must find the same
        parameters |= {name: tensor for name, tensor in cut.elsewhere.items() if isinstance(tensor, torch.nn.Parameter)}
        if cut.tied:
            parameters["lm_head.weight"] = parameters["model.embed_tokens.weight"]
    names = list(dict.fromkeys(prefix for name in parameters for prefix in _prefixes(name)))
    frozen = []
    for pattern in patterns:
        matched = [name for name in parameters if any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))]
        _refuse_unmatched(pattern, matched, names, "parameter")
        frozen += matched
    for name in frozen:
        parameters[name].requires_grad = False
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"freeze={list(patterns)} leaves nothing to train: all {len(parameters)} parameters match")
    return list(dict.fromkeys(frozen))


def refuse_row_adapters(model: Any) -> None:
    """Raises ValueError if an adapter of a PEFT model makes a token's result depend on the rest of its row of tokens,
    which holds several documents and parts of documents. Other models pass."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        reason = None
        if config.is_prompt_learning:
            reason = "puts virtual tokens before a row of tokens, which holds several documents and parts of documents"
        elif method in ROW_ADAPTERS:
            reason = ROW_ADAPTERS[method]
        else:
            asked = (key for key in PLANS_DIFFER if getattr(config, key, None) is not None)
            reason = next((f"with {key} {REFUSED_KEYS[key]}" for key in asked), None)
        if reason:
            raise ValueError(
                f"the adapter {name!r} ({method}) {reason}. Valid: methods that act on each token alone, for instance LoRA"
            )


def merged_adapters(model: Any) -> list[str]:
    """Name the adapters of a PEFT model that are merged into the weights that they stand on, where no gradient reaches them."""
    if not getattr(model, "peft_config", None):
        return []
    return sorted({name for module in model.modules() for name in getattr(module, "merged_adapters", ())})


def shared_among_layers(model: Any) -> list[str]:
    """Name the trained weights of adapters that are one tensor in several layers, by their first names; none without adapters."""
    if not getattr(model, "peft_config", None):
        return []
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.requires_grad:
            names.setdefault(id(weight), []).append(name)
    layers = ({match[0] for name in of_weight if (match := NUMBER.search(name))} for of_weight in names.values())
    return [of_weight[0] for of_weight, numbers in zip(names.values(), layers) if len(numbers) > 1]


def copies_of_tied(model: Any) -> list[str]:
    """List the modules of which a PEFT model trains a copy (`modules_to_save`) beside a weight that they share with others, where
    nothing ties the copies (`ensure_weight_tying`)."""
    configs = (getattr(model, "peft_config", None) or {}).values()
    copying = [config for config in configs if getattr(config, "modules_to_save", None)]
    if all(getattr(config, "ensure_weight_tying", False) for config in copying):
        return []
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    shared = [name for names in names_of.values() if len(names) > 1 for name in names]
    return [name.partition(ORIGINAL)[0].rpartition(".")[2] for name in shared if ORIGINAL in name]


def adapters_of_two(model: Any) -> list[str]:
    """List the adapters' weights that PEFT keeps a second time, as other parameters of the same memory, transposed: LoRA on
    embeddings whose output head `ensure_weight_tying` gives the same adapter."""
    if not getattr(model, "peft_config", None):
        return []
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return [name for name, weight in trained if ".lora_" in name and not weight.is_contiguous()]


def _prefixes(name: str) -> list[str]:
    """a.b.c -> a, a.b, a.b.c"""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _refuse_tokens(model: Any, given: Sequence[int] | Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError if embeddings (or the module that a mapping names) have no row for a token id."""
    modules = dict(model.named_modules())
    for target, ids in given.items() if isinstance(given, Mapping) else [(None, given)]:
        matched = [name for name in modules if target and (name == target or name.endswith(f".{target}"))]
        if target is not None:
            _refuse_unmatched(target, matched, list(modules)[1:], "module")
        parts = [modules[name] for name in matched] or [model.get_input_embeddings()]
        rows = min(part.weight.shape[0] for part in parts)
        outside = [number for number in ids if not 0 <= number < rows]
        if outside:
            raise ValueError(
                f"trainable_token_indices: {outside} are no rows of {target or 'the embeddings'}, which have {rows}; valid: 0 to "
                f"{rows - 1}"
            )


def _refuse_unmatched(pattern: str, matched: Sequence[str], names: Sequence[str], kind: str) -> None:
    if matched:
        return
    ends = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    near = difflib.get_close_matches(pattern, [*names, *ends], n=3) or list(names)[:3]
    raise ValueError(f"{pattern!r} matches no {kind} of the model; near or for instance: {', '.join(near)}")
