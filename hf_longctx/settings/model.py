"""The section `model`: pretrained weights or a new model, and what of it is trained."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hf_longctx.models.rope_scaling import check_scaling
from hf_longctx.settings.families import refused_directory
from hf_longctx.settings.fields import Number, Section, Tokens, beside, shown

EMBEDDED_MODEL = "embedded:smollm2-135m"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MODEL_FILE = "config.json"


class LoraSection(Section):
    """LoRA adapters: arguments of `hf_longctx.models.adapters.add_lora`."""

    r: int = Field(default=16, gt=0)
    """rank of each adapter"""
    alpha: Number = Field(default=32.0, gt=0)
    """an adapter's update is scaled by alpha / r"""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """probability that an adapter's input is dropped; above 0, plans differ by what they drop"""
    target_modules: str | list[str] = "all-linear"
    """all-linear (all but the output head), or names of modules"""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, targets: Any) -> str | list[str]:
        names = isinstance(targets, list) and targets and all(isinstance(name, str) and name for name in targets)
        if targets != "all-linear" and not names:
            raise ValueError(f"must be all-linear or a non-empty list of module names, got {shown(targets)}")
        return targets


class RopeScalingSection(Section):
    """Rotary positions stretched to longer documents: arguments of `hf_longctx.models.rope_scaling.scale_rope`."""

    rope_type: str
    """linear, yarn or llama3"""
    factor: Number
    """context after scaling / context of pretraining"""
    original_max_position_embeddings: Tokens | None = Field(default=None, gt=0)
    """context of pretraining, in tokens; null: what the model's configuration says"""
    beta_fast: Number | None = None
    """yarn: rotations in the pretrained context above which a frequency is kept"""
    beta_slow: Number | None = None
    """yarn: rotations below which a frequency is divided by the factor"""
    attention_factor: Number | None = None
    """yarn: what scores are sharpened by"""
    low_freq_factor: Number | None = None
    """llama3: wavelengths above original / low_freq_factor are stretched by the factor"""
    high_freq_factor: Number | None = None
    """llama3: wavelengths below original / high_freq_factor are kept"""

    @model_validator(mode="after")
    def _one_scaling(self) -> Self:
        common = {"rope_type", "factor", "original_max_position_embeddings"}
        check_scaling(self.rope_type, self.factor, self.model_dump(exclude=common))
        return self


class ModelConfig(Section):
    """Which model is trained: pretrained weights (`path`) or a new, randomly initialised model (`random_init`)."""

    path: str | None = Field(default=None, min_length=1)
    """a directory made by save_pretrained, a hub id, or embedded:smollm2-135m"""
    random_init: dict[str, Any] | None = Field(default=None, validate_default=True)
    """keys of a transformers model configuration, model_type among them"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the weights; training.bf16 adds autocast on top (small updates round away in pure bfloat16)"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""
    uncertified: bool = False
    """train a model of which no tiny copy could be tested ([certificates](models.md)), one whole document in a micro-batch; one
    that was tested and differs is refused all the same"""
    rope_scaling: RopeScalingSection | None = None
    """stretch rotary positions to longer documents; saved in the checkpoint"""
    freeze: list[str] | None = Field(default=None, min_length=1)
    """parameters that stay as they are: names of parameters or modules, with shell wildcards"""
    lora: LoraSection | None = Field(default=None, validate_default=True)
    """train adapters, and save only them; all else is frozen. {} for the defaults"""
    load_in_4bit: bool = False
    """QLoRA: the frozen weights are held in 4 bits (NF4); needs lora, CUDA and the package bitsandbytes"""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what no single key says."""
        if self.path is not None and (reason := refused_directory(self.path)) is not None:
            yield "path", f"{self.path}: {reason}"

    @field_validator("lora")
    @classmethod
    def _on_saved_weights(cls, lora: LoraSection | None, info: ValidationInfo) -> LoraSection | None:
        if lora is not None and info.data.get("random_init") is not None:
            raise ValueError(
                "adapters are saved without the weights they stand on, and those of model.random_init are saved nowhere: give "
                "model.path"
            )
        if lora is not None and info.data.get("freeze") is not None:
            raise ValueError("all weights but the adapters' are frozen already: remove model.freeze or model.lora")
        return lora

    @field_validator("load_in_4bit")
    @classmethod
    def _with_adapters(cls, four_bit: bool, info: ValidationInfo) -> bool:
        if four_bit and info.data.get("lora", ...) is None:
            raise ValueError(
                "weights of 4 bits cannot be trained, only adapters on them: set model.lora ({} for defaults)"
            )
        return four_bit

    @field_validator("path")
    @classmethod
    def _a_model(cls, path: str | None) -> str | None:
        if path is None or path == EMBEDDED_MODEL:
            return path
        if path.startswith("embedded:"):
            raise ValueError(f"the only embedded model is {EMBEDDED_MODEL}, got {path!r}")
        directory = Path(path)
        if directory.is_dir() and not (directory / MODEL_FILE).is_file():
            inside = sorted(str(file.parent) for file in directory.glob(f"*/{MODEL_FILE}"))
            near = f"; did you mean {inside[-1]!r}?" if inside else ""
            raise ValueError(f"must be a directory with {MODEL_FILE}, and {path!r} has none{near}")
        if not directory.is_dir() and (directory.exists() or not HUB_ID.fullmatch(path)):
            raise ValueError(
                f"must be {EMBEDDED_MODEL}, an existing directory, or a hub's org/name, got {path!r} (relative to {Path.cwd()})"
                f"{beside(path)}"
            )
        return path

    @field_validator("random_init")
    @classmethod
    def _one_source(cls, random_init: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if "path" in info.data and (info.data["path"] is None) == (random_init is None):
            given = "neither" if random_init is None else "both"
            raise ValueError(
                "give exactly one of model.path (pretrained weights) and model.random_init (a new model), "
                f"got {given}; null unsets a key"
            )
        return random_init
