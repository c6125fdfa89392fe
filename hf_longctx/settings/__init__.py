"""The sections of a YAML file, as pydantic models: their keys, types, and what is valid together.

Only names, types and small files are looked at: nothing is loaded, neither torch nor transformers is imported, and
nothing is sent between ranks. hf_longctx/config.py reads files and reports what is wrong in them.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from hf_longctx.settings.data import (
    ANY_SPLIT,
    EMBEDDED_DATA,
    EMBEDDED_SPLITS,
    FILE_KINDS,
    DataConfig,
    SourceKeys,
    SourceSection,
)
from hf_longctx.settings.fields import Section
from hf_longctx.settings.longctx import LongctxConfig
from hf_longctx.settings.model import EMBEDDED_MODEL, LoraSection, ModelConfig, RopeScalingSection

__all__ = [
    "ANY_SPLIT",
    "EMBEDDED_DATA",
    "EMBEDDED_MODEL",
    "EMBEDDED_SPLITS",
    "FILE_KINDS",
    "Config",
    "DataConfig",
    "LongctxConfig",
    "LoraSection",
    "ModelConfig",
    "RopeScalingSection",
    "Section",
    "SourceKeys",
    "SourceSection",
]


class Config(Section):
    """A whole run."""

    model: ModelConfig
    """the model to train"""
    data: DataConfig
    """the documents to train on"""
    longctx: LongctxConfig
    """how documents are spread over ranks"""
    training: Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default={}
    )
    """fields of transformers.TrainingArguments"""
