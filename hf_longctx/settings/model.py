"""The section `model`: pretrained weights or a new model, and what of it is trained."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hf_longctx.models.adapters.lora_keys import REFUSED_KEYS
from hf_longctx.models.rope_scaling import check_scaling
from hf_longctx.settings.families import refused_directory
from hf_longctx.settings.fields import Names, Number, Section, Tokens, as_names, beside, shown

TEMPLATES = ("chatml", "llama3", "gemma", "qwen", "alpaca")
"""Chat templates that are shipped (data/chats/shipped_templates.py)."""
EMBEDDED_MODEL = "embedded:smollm2-135m"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MODEL_FILE = "config.json"
PLAIN = re.compile(r"[\w.-]+")
"""A module's name, or its end: no regular expression."""


class LoraSection(Section):
    """LoRA adapters: arguments of `hf_longctx.models.adapters.peft_adapters.add_lora`, which are those of PEFT's LoraConfig."""

    r: int = Field(default=16, gt=0)
    """rank of each adapter"""
    alpha: Number = Field(default=32.0, gt=0)
    """an adapter's update is scaled by alpha / r"""
    dropout: Number = Field(default=0.0, ge=0, lt=1)
    """probability that an adapter's input is dropped; above 0, plans differ by what they drop"""
    target_modules: Literal["all-linear"] | Names = "all-linear"
    """all-linear (all but the output head), or names of modules"""
    exclude_modules: Names | None = None
    """names of modules that get none"""
    target_parameters: Names | None = None
    """names of parameters, for instance of experts, that get one"""
    modules_to_save: Names | None = None
    """modules that are trained whole and saved beside the adapters: embed_tokens and lm_head of a model that learns new tokens"""
    trainable_token_indices: list[int] | dict[str, list[int]] | None = Field(default=None, min_length=1)
    """token ids whose embeddings are trained, and no others; by name of a module, or of the input embeddings"""
    ensure_weight_tying: bool | None = None
    """whether what is trained of tied embeddings stays tied; null: where the model ties them"""
    use_rslora: bool = False
    """scale by alpha / sqrt(r) (arXiv 2312.03732)"""
    use_dora: bool = False
    """train magnitudes beside directions (arXiv 2402.09353)"""
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "olora", "pissa"] = True
    """what adapters begin as; olora (arXiv 2406.01775) and pissa (arXiv 2404.02948) take a part of the frozen weights out, in the
    same way when they are loaded again"""
    bias: Literal["none", "all", "lora_only"] = "none"
    """which biases are trained"""
    lora_bias: bool = False
    """a bias in each adapter"""
    rank_pattern: dict[str, int] | None = Field(default=None, min_length=1)
    """other ranks, by the name of a module or a regular expression"""
    alpha_pattern: dict[str, Number] | None = Field(default=None, min_length=1)
    """other alphas, likewise"""
    layers_to_transform: list[int] | None = Field(default=None, min_length=1)
    """numbers of the layers that get adapters"""
    layers_pattern: Names | None = None
    """names of the lists of layers, where they are not the usual ones"""
    fan_in_fan_out: bool = False
    """weights lie as [in, out] (GPT-2)"""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in REFUSED_KEYS:
                raise ValueError(f"{key} ({shown(given[key])}) {REFUSED_KEYS[key]}")
        return given

    @field_validator("trainable_token_indices")
    @classmethod
    def _ids(cls, given: list[int] | dict[str, list[int]] | None) -> list[int] | dict[str, list[int]] | None:
        lists = given.values() if isinstance(given, dict) else [given or []]
        if any(number < 0 for numbers in lists for number in numbers):
            raise ValueError(f"must be ids of tokens, each at least 0, got {shown(given)}")
        return given

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, targets: Any) -> str | list[str]:
        names = targets if targets == "all-linear" else as_names(targets)
        plain = (
            isinstance(names, list) and names and all(isinstance(name, str) and PLAIN.fullmatch(name) for name in names)
        )
        if names != "all-linear" and not plain:
            raise ValueError(f"must be all-linear or a non-empty list of module names, got {shown(targets)}")
        return names


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
    """The model that is trained: pretrained weights (`path`) or a new, randomly initialised model (`random_init`)."""

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
    chat_template: str | None = Field(default=None, min_length=1)
    """how conversations are written: chatml, llama3, gemma, qwen, alpaca, or a file with a jinja template; null: as the tokenizer
    says. Saved with it"""
    added_tokens: Names | None = None
    """special tokens that the tokenizer and the model are given, for instance those of a chat template; the new embeddings begin
    as the mean of the others. Beside lora they need modules_to_save or trainable_token_indices"""
    eos_token: str | None = Field(default=None, min_length=1)
    """what ends texts and answers, one token, for instance the end of a chat template's turns; null: the tokenizer's"""
    rope_scaling: RopeScalingSection | None = None
    """stretch rotary positions to longer documents; saved in the checkpoint"""
    config: dict[str, Any] | None = None
    """keys of the model's configuration that are to differ from its config.json, for instance {attn_pdrop: 0}, or
    {output_router_logits: true} for the loss by which transformers balances experts; saved in the checkpoint"""
    freeze: Names | None = None
    """parameters that stay as they are: names of parameters or modules, with shell wildcards"""
    lora: LoraSection | None = Field(default=None, validate_default=True)
    """train adapters, and save only them; all else is frozen. {} for the defaults"""
    load_in_4bit: bool = False
    """QLoRA: the frozen weights are held in 4 bits (NF4); needs lora, CUDA and the package bitsandbytes"""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what no single key says."""
        if self.path is not None and (reason := refused_directory(self.path)) is not None:
            yield "path", f"{self.path}: {reason}"
        for name in ("chat_template", "added_tokens", "eos_token"):
            if self.path is None and getattr(self, name) is not None:
                yield (
                    name,
                    f"{shown(getattr(self, name))} is for a tokenizer, and model.random_init has none: give model.path",
                )
        if self.path is None and self.config is not None:
            yield "config", f"{shown(self.config)} is for model.path: give all keys of a new model to model.random_init"
        template = self.chat_template
        if template is not None and template not in TEMPLATES and not Path(template).is_file():
            yield (
                "chat_template",
                f"must be one of {', '.join(TEMPLATES)}, or a file with a jinja template, got {template!r}{beside(template)}",
            )
        lora = self.lora
        if self.added_tokens and lora and not (lora.modules_to_save or lora.trainable_token_indices):
            yield (
                "added_tokens",
                f"{shown(self.added_tokens)} beside lora, which would not train their embeddings: set lora.modules_to_save "
                "[embed_tokens, lm_head], or lora.trainable_token_indices (their ids)",
            )

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
