"""patch_model and from_pretrained: ordinary transformers models that can also run over a layout.

Llama, Mistral, Mixtral, BLOOM and MPT get attention classes of ours (hf_longctx/models). Of any other model a tiny copy is run
first: its certificate says what the model needs, and that it is computed exactly (hf_longctx/certificate).
"""

import os
from typing import Any, TypeVar

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longctx.certificate import accepted_certificate
from hf_longctx.models.patch import attention_layers, install
from hf_longctx.models.stages import loading_stages, refuse_loading_stages
from hf_longctx.models.wrappers import language_model_of

Model = TypeVar("Model", bound=PreTrainedModel)
WRAPPED = {
    "DataParallel": "model.module",
    "DistributedDataParallel": "model.module",
    "FullyShardedDataParallel": "model.module",
    "OptimizedModule": "model._orig_mod",
    "PeftMixedModel": "a PeftModel (get_peft_model without mixed=True)",
}
"""Classes around a model -> what is valid in their place. What torch.compile makes is an OptimizedModule."""


def patch_model(
    model: Model,
    *,
    kernel: str = "auto",
    loss_chunk_tokens: int = 1024,
    keep_last_slice: bool = False,
    mlp_tile_tokens: int = 0,
    compile_layers: bool = False,
    liger_kernels: bool = True,
    uncertified: bool = False,
) -> Model:
    """Makes an existing causal language model able to run over a layout. Weights, class and ordinary behaviour stay
    as they are.

    Args:
        model: a causal language model, or a wrapper that holds one (PEFT).
        kernel: attention kernel; see `hf_longctx.attention.kernels.select_kernel`.
        loss_chunk_tokens: rows of logits that exist at once in the loss.
        keep_last_slice: keep the keys and values that each layer's forward received last, for its backward to start
            from: one exchange less a layer, for the memory of that slice.
        mlp_tile_tokens: tokens of which an MLP's inner activations exist at once; 0: all. See models/tiled_mlp.py.
        compile_layers: torch.compile what does not depend on the layout (Llama, Mistral, Mixtral). See models/compiled_layers.py.
        liger_kernels: use Liger's kernels on CUDA where the package is installed and layers are not compiled.
        uncertified: take a model of which no tiny copy could be tested, with a warning: the plain model runs, on one whole
            document in a micro-batch. One that differs is refused all the same.

    Returns:
        The same object. Patching twice changes the settings only.

    Raises:
        ValueError: the model is not computed exactly over layouts, as its certificate shows, or could not be tested, or has
            settings that cannot be honoured (attention dropout, RoPE scaling that depends on the call, BLOOM's sliced
            projections, an adapter that looks at a whole row of tokens), its loss is not the cross-entropy of its logits
            (models/loss/head_check.py), its layers cannot be compiled in parts, or a setting is out of range. The model is then
            unchanged.
    """
    refuse_no_model(model)
    language_model = language_model_of(model)
    traits = certificate = None
    if not attention_layers(model):
        traits = getattr(language_model, "longctx_traits", None)
        if traits is None:
            certificate = accepted_certificate(language_model, uncertified)
            traits = certificate.traits
    install(
        model,
        traits,
        kernel=kernel,
        loss_chunk_tokens=loss_chunk_tokens,
        keep_last_slice=keep_last_slice,
        mlp_tile_tokens=mlp_tile_tokens,
        compile_layers=compile_layers,
        liger_kernels=liger_kernels,
    )
    if certificate is not None:
        language_model.longctx_certificate = certificate
    return model


def from_pretrained(
    path: str,
    *,
    kernel: str = "auto",
    loss_chunk_tokens: int = 1024,
    keep_last_slice: bool = False,
    mlp_tile_tokens: int = 0,
    compile_layers: bool = False,
    liger_kernels: bool = True,
    uncertified: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(path, **kwargs)`, patched. Arguments and errors of `patch_model` apply.

    With `distributed_config=DistributedConfig(pp_size=p, tp_size=t)` each process reads its stage's part alone; a multiple of p *
    t processes makes stages of several HDP ranks. Needs transformers 5.19 or later."""
    _refuse_no_path(path)
    refuse_loading_stages(kwargs.get("distributed_config"))
    with loading_stages():
        model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    return patch_model(
        model,
        kernel=kernel,
        loss_chunk_tokens=loss_chunk_tokens,
        keep_last_slice=keep_last_slice,
        mlp_tile_tokens=mlp_tile_tokens,
        compile_layers=compile_layers,
        liger_kernels=liger_kernels,
        uncertified=uncertified,
    )


def refuse_no_model(model: Any) -> None:
    """Raise TypeError for what is no model that has been loaded, as a path is."""
    if isinstance(model, torch.nn.Module):
        if (inside := WRAPPED.get(type(model).__name__)) is not None:
            kind, within = type(model).__name__, type(getattr(model, inside.partition(".")[2], None)).__name__
            around = f" around a {within}" if within != "NoneType" else ""
            raise TypeError(
                f"model is of class {kind}{around}, and a model runs over layouts by itself. Valid: {inside}"
            )
        return
    shown = repr(model) if model is None or isinstance(model, (str, os.PathLike)) else f"a {type(model).__name__}"
    raise TypeError(
        f"model is {shown}: it must be a causal language model that has been loaded. Valid: hf_longctx.from_pretrained(path), or "
        "a model of transformers"
    )


def _refuse_no_path(path: Any) -> None:
    """Raise ValueError for a path at which nothing is, and which can be no name on the hub either."""
    if os.path.exists(path):
        return
    try:
        validate_repo_id(str(path))
    except HFValidationError:
        raise ValueError(
            f"{str(path)!r} is no existing directory (relative to {os.getcwd()}), and no hub's org/name. Valid: a directory that "
            "save_pretrained wrote, or the name of a model on the hub"
        ) from None
