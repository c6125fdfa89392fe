"""Installs what lets an ordinary transformers model run over a layout too."""

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_longctx.attention.kernels import KERNELS
from hf_longctx.models import liger
from hf_longctx.models.adapters.peft_adapters import refuse_row_adapters
from hf_longctx.models.adapters.quantised import refuse_rows_that_meet
from hf_longctx.models.attention import NAME, NAME_OF_EAGER, LayoutAttention, is_patched, runs_sdpa
from hf_longctx.models.compiled_layers import set_compiled
from hf_longctx.models.document_wise import DocumentWise
from hf_longctx.models.families import FAMILIES
from hf_longctx.models.general import (
    needs_own_logits,
    refuse_no_language_model,
    refuse_random_attention,
    refuse_unreachable,
)
from hf_longctx.models.loss.head import LayoutForward, head_forward, install_forward, install_head
from hf_longctx.models.loss.head_check import needs_own_forward
from hf_longctx.models.partial_gradients import sum_parts_as_they_come
from hf_longctx.models.registered import EAGER_MODELS
from hf_longctx.models.stages import adopt_stages, cut_of, loaded_stages
from hf_longctx.models.tiled_mlp import MlpForward, own_forward, runs_in_tiles
from hf_longctx.models.traits import Traits
from hf_longctx.models.wrappers import language_model_of

SAME_LOSS = ("trl", "liger_kernel")
"""Packages whose forwards, set on a model, only compute the cross-entropy without all logits: TRL 1.16's SFTTrainer sets one."""
ATTENTION_OF_TRANSFORMERS = ("eager", "sdpa", "flash_attention", "flex_attention", "paged", NAME)
"""Beginnings of the names of attention functions that compute softmax attention as it is; those of the kernels hub hold a /."""
ATTENTION_CLASSES = {family.attention: family.layout_attention for family in FAMILIES}
BASE_FORWARDS = {family.base_model: family.base_forward for family in FAMILIES if family.base_forward is not None}
COMPILED_LAYERS = {
    family.decoder_layer: family.compiled_layer
    for family in FAMILIES
    if family.decoder_layer is not None and family.compiled_layer is not None
}
TILED_MLPS = {family.tiled_mlp for family in FAMILIES}
LIGER_NORMS = {family.liger_norm for family in FAMILIES}
LIGER_MLPS = {family.liger_mlp for family in FAMILIES}

Model = TypeVar("Model", bound=PreTrainedModel)


def install(
    model: Model,
    traits: Traits | None,
    *,
    kernel: str = "auto",
    loss_chunk_tokens: int = 1024,
    keep_last_slice: bool = False,
    mlp_tile_tokens: int = 0,
    compile_layers: bool = False,
    liger_kernels: bool = True,
) -> Model:
    """Make a causal language model able to run over a layout, as `hf_longctx.patch_model` describes.

    Args:
        traits: what a model needs that is none of the families with attention classes of ours; None: it is one of them.
        others: see `hf_longctx.patch_model`.

    Raises:
        ValueError: see there. The model is then unchanged, but for stages that it was loaded in, which are ours.
    """
    _refuse_settings(kernel, loss_chunk_tokens, mlp_tile_tokens)
    refuse_row_adapters(model)
    language_model = language_model_of(model)
    if loaded_stages(language_model) > 1:
        adopt_stages(language_model)
    attention = attention_layers(language_model)
    already = is_patched(language_model)
    if not already:
        _refuse_replaced(language_model)
    own_forward_needed = _refuse_model(language_model, attention, traits)
    tiled = {module for module in language_model.modules() if type(module) in TILED_MLPS or runs_in_tiles(module)}
    if mlp_tile_tokens and not tiled:
        raise ValueError(
            f"mlp_tile_tokens={mlp_tile_tokens}: {type(language_model).__name__} has no MLP that is known to compute each "
            "token by itself, so nothing can run in tiles. Valid: 0"
        )
    head = language_model.get_output_embeddings()
    sum_parts_as_they_come(language_model)
    set_compiled(language_model, compile_layers, COMPILED_LAYERS)
    liger_here = liger_kernels and not compile_layers and liger.installed()
    # Without attention layers of ours, masks carry the layout, and the model the settings.
    for module in attention or [language_model]:
        module.__class__ = ATTENTION_CLASSES.get(type(module), type(module))
        module.longctx_kernel = kernel
        module.longctx_keep_last_slice = keep_last_slice
        module.longctx_liger = liger_here
    _set_norms_and_mlps(language_model, tiled, mlp_tile_tokens, liger_here)
    _set_implementation(language_model, attention, traits)
    if language_model.__dict__.get("is_quantized") is False:  # its packed weights were expanded as they were loaded
        # transformers would save them under the names of packed ones, which no model finds again (seen of MXFP4 in 5.23).
        language_model._weight_conversions = None
    language_model.longctx_loss_chunk_tokens = loss_chunk_tokens
    language_model.longctx_own_logits = own_forward_needed
    if traits is not None:
        _set_traits(language_model, traits)
    if not already:
        if cut_of(language_model) is None:
            install_forward(language_model, head_forward)
        if isinstance(head, torch.nn.Linear) and not own_forward_needed:
            install_head(head)
        if (base_forward := BASE_FORWARDS.get(type(language_model.base_model))) is not None:
            install_forward(language_model.base_model, base_forward)
    return model


def _refuse_settings(kernel: str, loss_chunk_tokens: int, mlp_tile_tokens: int) -> None:
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is unknown; valid: auto, {', '.join(KERNELS)}")
    if loss_chunk_tokens < 1:
        raise ValueError(
            f"loss_chunk_tokens={loss_chunk_tokens}: at least one row of logits must exist; the default is 1024"
        )
    if mlp_tile_tokens < 0:
        raise ValueError(f"mlp_tile_tokens={mlp_tile_tokens} must be a number of tokens, or 0 for no tiles")


def _refuse_replaced(language_model: Any) -> None:
    """Refuse a model whose forward or attention function somebody has replaced by one that would not be called."""
    own = vars(language_model).get("forward")
    # Its globals say where it was written; functools.wraps has it say what it wraps.
    written_in = getattr(getattr(own, "__func__", own), "__globals__", {}).get("__name__", "")
    # Ours runs a stage of a pipeline; a hook of accelerate moves inputs to the device of a model loaded in 4 or 8 bits.
    is_known = isinstance(own, LayoutForward) or hasattr(language_model, "_hf_hook")
    if own is not None and not is_known and written_in.split(".")[0] not in SAME_LOSS:
        valid = (
            "patch_model(model) before accelerator.prepare_model(model)"
            if hasattr(language_model, "_original_forward")
            else "a forward pre-hook or hook, or what is to wrap the forward over layouts, set after patch_model(model)"
        )
        raise ValueError(
            f"forward was set on this {type(language_model).__name__}, and a forward over layouts would take its place: what it "
            f"does (autocast, say) would be lost. Valid: {valid}"
        )
    name = language_model.config.get_text_config(decoder=True)._attn_implementation
    if isinstance(name, str) and "/" not in name and not name.startswith(ATTENTION_OF_TRANSFORMERS):
        raise ValueError(
            f"attention function {name!r} was registered by somebody, and attention over layouts would take its place: what it "
            "computes would be lost. Valid: model.set_attn_implementation('sdpa') before, if that computes the same"
        )


def _refuse_model(language_model: Any, attention: list[Any], traits: Traits | None) -> bool:
    """Refuse a model that cannot run over a layout. Returns whether it needs its own forward, or logits, for the loss.

    Args:
        attention: its `attention_layers`.
    """
    refuse_rows_that_meet(language_model)
    config = language_model.config
    for cls in {ATTENTION_CLASSES.get(type(module), type(module)) for module in attention}:
        cls.check_config(config)
    if traits is not None and traits.alone:
        return needs_own_logits(language_model)
    if attention:
        refuse_random_attention(config)
    else:
        refuse_unreachable(language_model)
    return needs_own_forward(language_model, certified=traits is not None)


def _set_norms_and_mlps(language_model: Any, tiled: set[Any], mlp_tile_tokens: int, liger_here: bool) -> None:
    """Let norms and MLPs run Liger's kernels where they are wanted, and the MLPs `tiled` in tiles of so many tokens."""
    for module in language_model.modules():
        if type(module) in LIGER_NORMS:
            _set_forward(module, liger.LigerNorm(module) if liger_here else None, liger.LigerNorm)
        elif module in tiled:
            is_swiglu = type(module) in LIGER_MLPS and module.config.hidden_act == "silu"
            run = liger.gated_mlp if liger_here and is_swiglu else own_forward
            changed = mlp_tile_tokens or run is not own_forward
            _set_forward(module, MlpForward(module, run, mlp_tile_tokens) if changed else None, MlpForward)


def _set_implementation(language_model: Any, attention: list[Any], traits: Traits | None) -> None:
    """Choose the attention implementation of transformers that takes layouts."""
    config = language_model.config
    if config.model_type in EAGER_MODELS:
        config._attn_implementation = "eager"  # the one that they have, whatever they were loaded with
    elif traits is None or traits.in_masks:
        name = NAME if runs_sdpa(language_model) or attention else NAME_OF_EAGER
        language_model.set_attn_implementation(_names(config, attention, name))


def _set_traits(language_model: Any, traits: Traits) -> None:
    """Keep the traits on the model, and run the modules that they name on each document alone."""
    language_model.longctx_traits = traits
    language_model.longctx_implementation = language_model.config.get_text_config(decoder=True)._attn_implementation
    for module in traits.modules_by_document(language_model):
        if not isinstance(module.__dict__.get("forward"), DocumentWise):
            module.forward = DocumentWise(module)


def attention_layers(model: Any) -> list[Any]:
    """The attention layers of a model, also inside a PEFT wrapper, that `patch_model` makes ours or has made ours; none of any
    other model, which its traits describe.

    Raises:
        ValueError: it is no causal language model of transformers.
    """
    language_model = language_model_of(model)
    layers = [m for m in language_model.modules() if type(m) in ATTENTION_CLASSES or isinstance(m, LayoutAttention)]
    if not layers:
        refuse_no_language_model(language_model)
    return layers


def _set_forward(module: torch.nn.Module, forward: Any, ours: type) -> None:
    """Install `forward` on the instance, or remove ours if None. A forward set by someone else (expert parallelism) is left
    alone."""
    if isinstance(module.__dict__.get("forward", forward), ours):
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.forward = forward


def _names(config: Any, attention: list[Any], name: str) -> dict[str, str]:
    """Names each part for `set_attn_implementation`: ours for the model and its text, not for towers of other kinds beside it."""
    texts = {id(module.config) for module in attention} or {id(config.get_text_config(decoder=True))}
    return {"": name} | {key: name for key in config.sub_configs if id(getattr(config, key, None)) in texts}
