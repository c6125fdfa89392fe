"""A model without memory, made from its configuration: its decoder layers, its output head, and a forward of it.

Parameters and activations are torch's fake tensors: they have a shape, a dtype and a device, and no values. A model of 671
billion parameters takes seconds. Modeling code that decides by values cannot run on them; it is refused by the line that does.
"""

from __future__ import annotations

import copy
import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, masking_utils
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as BASES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_longctx.counting.records import NotCountedError
from hf_longctx.counting.stand_ins import NAME

REMEDY = "valid: models whose code decides nothing by values, as loops over the experts that were chosen do"


@dataclass(frozen=True)
class Built:
    """A model on fake tensors."""

    model: Any
    mode: FakeTensorMode
    by_interface: bool
    """Whether attention goes through transformers' interface; else it computes its own scores."""


def transformers_config(config: Any) -> Any:
    """Return a configuration of transformers with these fields; one that is of transformers already is copied.

    Raises:
        NotCountedError: transformers has no causal language model of its type, or refuses its fields.
    """
    family = getattr(config, "model_type", None)
    if hasattr(config, "to_dict"):
        made = copy.deepcopy(config)
    else:
        try:
            made = AutoConfig.for_model(**vars(config))
        except Exception as error:  # of any configuration's own checks
            raise NotCountedError(f"model_type={family!r} cannot be counted: {_said(error)}") from error
    if family not in CLASSES and class_with_head(made) is None and not _is_language_model_of(made):
        text = getattr(getattr(config, "text_config", None), "model_type", None)
        inside = f"; its text_config ({text}) may be counted" if text else ""
        raise NotCountedError(
            f"model_type={family!r} cannot be counted: transformers makes no causal language model of it{inside}"
        )
    return made


def class_with_head(config: Any) -> Any:
    """Return the class of causal language models that takes the text part of a larger configuration, as those of Emu 3 and Mllama
    do: transformers lists it under the larger one's type alone. None: there is none."""
    if config.model_type in CLASSES or config.is_encoder_decoder:
        return None
    modeling = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(modeling)
    except ImportError:
        return None
    classes = (getattr(module, name, None) for name in CLASSES.values() if isinstance(name, str))
    return next((cls for cls in classes if getattr(cls, "config_class", None) is type(config)), None)


def _is_language_model_of(config: Any) -> bool:
    """Tell whether a configuration may be that of a decoder inside a model which also reads images or sound."""
    if getattr(config, "model_type", None) not in BASES or not hasattr(config, "get_text_config"):
        return False
    return config.get_text_config() is config and not config.is_encoder_decoder and hasattr(config, "vocab_size")


class TextWithHead(torch.nn.Module):
    """The language model of a model that also reads images or sound, with an output head as the whole has one."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.config, self.model = base.config, base
        embeddings = base.get_input_embeddings().weight
        self.lm_head = torch.nn.Linear(base.config.hidden_size, base.config.vocab_size, False, dtype=embeddings.dtype)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        return self.lm_head(self.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state)

    def tie_weights(self) -> None:
        if getattr(self.config, "tie_word_embeddings", False):
            self.lm_head.weight = self.model.get_input_embeddings().weight

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def build(config: Any, dtype: torch.dtype) -> Built:
    """Make a model of a configuration of transformers, in evaluation mode.

    Raises:
        NotCountedError: it cannot be made, with what transformers says.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    errors = []
    for attention in (NAME, "eager"):  # classes without the interface know only the names of their own classes
        own = copy.deepcopy(config)
        own._experts_implementation = None
        try:
            with mode, _quiet(), no_init_weights():
                if own.model_type in CLASSES:
                    model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation=attention)
                elif (cls := class_with_head(own)) is not None:
                    model = cls._from_config(own, dtype=dtype, attn_implementation=attention)
                else:
                    model = TextWithHead(AutoModel.from_config(own, dtype=dtype, attn_implementation=attention))
                model.tie_weights()  # which is left out where nothing is initialised
        except Exception as error:  # of any class's constructor
            errors.append(error)
            continue
        for module in model.modules():
            inner: Any = getattr(module, "config", None)
            if hasattr(inner, "to_dict"):
                inner._experts_implementation = NAME
        return Built(model.eval(), mode, attention == NAME)
    raise NotCountedError(f"{named(config)} cannot be counted: it cannot be made, {_said(errors[0])}") from errors[0]


def forward(built: Built, ids: torch.Tensor) -> None:
    """Run one document, ids int64 [1, T], through the model.

    Raises:
        NotCountedError: its code needs values, with the line that does.
    """
    try:
        # Masks of one document: whether a row holds several is found in values of positions.
        with _quiet(), patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None):
            built.model(input_ids=ids, use_cache=False)
    except Exception as error:  # of any modeling code
        config = built.model.config
        raise NotCountedError(
            f"{named(config)} cannot be counted: its forward does not run on shapes alone, {_said(error)}; {REMEDY}"
        ) from error


def layer_lists(model: Any) -> list[torch.nn.Module]:
    """All members of the lists that are in no other list: decoder layers, and where there is a tower for images, its layers.
    A member that is one linear layer or one norm is no layer of a model."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    names = [f"{name}." for name, _ in lists]
    outer = [module for name, module in lists if not any(name.startswith(other) for other in names)]
    return [layer for module in outer for layer in module if any(True for _ in layer.children())]


def linear_widths(module: torch.nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None for any other module, also for classes that make something else of one."""
    if type(module) is torch.nn.Linear:
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.nx, module.nf
    return None


def add_adapters(built: Built, rank: int, targets: tuple[str, ...] | None, dtype: torch.dtype) -> int:
    """Add LoRA adapters as PEFT does, which alone are trained then, to linear layers of these names (None: of all in decoder
    layers), and return their parameters."""
    built.model.requires_grad_(False)
    adapters = 0
    with built.mode:
        for layer in layer_lists(built.model):
            for name, module in layer.named_modules():
                widths = linear_widths(module)
                if widths is not None and (targets is None or name.rpartition(".")[2] in targets):
                    module.register_forward_hook(_Adapter(*widths, rank, dtype))
                    adapters += rank * sum(widths)
    # A product, because modeling code may change its embeddings in place.
    built.model.get_input_embeddings().register_forward_hook(lambda *called: called[-1].requires_grad_() * 1)
    return adapters


class _Adapter:
    """Adds what PEFT adds to a linear layer's output: the product of two matrices of `dtype`, [rank, inputs] and
    [outputs, rank]. A hook of modules."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        self.down = torch.nn.Parameter(torch.empty(rank, inputs, dtype=dtype))
        self.up = torch.nn.Parameter(torch.empty(outputs, rank, dtype=dtype))

    def __call__(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.linear(inputs[0].to(self.down.dtype), self.down)
        return (out + torch.nn.functional.linear(inner, self.up) * 2.0).to(out.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what transformers logs of models that are made: kernels that are missing, defaults."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def named(config: Any) -> str:
    """Return the words for a configuration in errors."""
    return f"model_type={getattr(config, 'model_type', None)!r}"


def _said(error: Exception) -> str:
    """An error in one line: what was raised, and the line of modeling code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "modeling_" in frame.filename or "configuration_" in frame.filename]
    place = f" ({ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno})" if ours else ""
    words = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {words}{place}"
