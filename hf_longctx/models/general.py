"""What can be said of a model of any class before it runs over a layout: whether its attention layers can receive one at all.

Whether a model is then computed exactly is not for this file: the certificate runs it.
"""

import inspect
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_longctx.models.attention import NAME, refuse_unsafe_rope
from hf_longctx.models.own_logits import own_output

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""transformers' table of attention functions, as modeling code names it."""
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
"""Fields of configurations for dropped attention probabilities."""


def refuse_unreachable(model: Any) -> None:
    """Raises ValueError, naming what is missing, if a layout cannot reach a causal language model's attention in its masks.
    Notes which part of the model turns tokens into hidden states (`base_of`)."""
    name = type(model).__name__
    if getattr(model, "longctx_cut", None) is not None:
        return
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is no causal language model of transformers with an output head: a layout has no way into it. Valid: a "
            "model of AutoModelForCausalLM"
        )
    base = _find_base(model)
    if not _calls_functions_by_name(model):
        raise ValueError(
            f"{name} has attention code of its own, which looks no function up by name: neither a layout nor "
            f"attn_implementation={NAME!r} can reach it. Valid: a class that uses transformers' attention interface"
        )
    parameters = inspect.signature(type(base).forward).parameters
    if "position_ids" not in parameters:
        raise ValueError(
            f"{type(base).__name__}.forward takes no position_ids: its positions are numbers of rows, which are those of no "
            "document where several share a row or one is split. Valid: a class whose base model takes position_ids"
        )
    refuse_unsafe_rope(model.config.get_text_config(decoder=True))


def _find_base(model: Any) -> Any:
    """The part whose output the class's forward turns into logits. Raises ValueError if none is found."""
    hidden = torch.zeros(
        1, 2, model.config.get_text_config(decoder=True).hidden_size, dtype=model.dtype, device=model.device
    )
    names = {id(part): part_name for part_name, part in model.named_modules()}
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    problems = []
    for part in {id(part): part for part in candidates if part is not None and part is not model}.values():
        model.__dict__["longctx_base"] = names[id(part)]
        try:
            with torch.no_grad():
                own_output(model, hidden)
            return part
        except Exception as error:  # of modeling code that is given something else than it expects
            problems.append(f"{names[id(part)]}: {type(error).__name__}: {str(error)[:200]}")
    model.__dict__.pop("longctx_base", None)
    raise ValueError(
        f"no part of {type(model).__name__} gives hidden states that its forward makes logits of ({'; '.join(problems)}). "
        "Valid: a causal language model whose forward calls its base model, and then a head"
    )


def _calls_functions_by_name(model: torch.nn.Module) -> bool:
    modules = {type(part).__module__ for part in (model, *model.modules())}
    sources = (sys.modules.get(name) for name in modules if not name.startswith("torch."))
    return any(hasattr(source, INTERFACE) for source in sources if source is not None)
