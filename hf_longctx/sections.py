"""The sections of a YAML file, as pydantic models: their keys, types, and what is valid together.

Only names, types and small files are looked at: nothing is loaded, neither torch nor transformers is imported, and
nothing is sent between ranks. config.py reads files and reports what is wrong in them.
"""

import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hf_longctx.models.rope_scaling import check_scaling

EMBEDDED_MODEL = "embedded:smollm2-135m"
EMBEDDED_DATA = "embedded:python-sources"
EMBEDDED_SPLITS = ("train", "test")
FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".md", ".arrow")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class LoraSection(Section):
    """LoRA adapters: arguments of `hf_longctx.models.adapters.add_lora`."""

    r: int = Field(default=16, gt=0)
    """rank of each adapter"""
    alpha: float = Field(default=32.0, gt=0, strict=False)
    """an adapter's update is scaled by alpha / r"""
    dropout: float = Field(default=0.0, ge=0, lt=1, strict=False)
    """probability that an adapter's input is dropped; above 0, plans differ by what they drop"""
    target_modules: str | list[str] = "all-linear"
    """all-linear (all but the output head), or names of modules"""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, targets: Any) -> str | list[str]:
        names = isinstance(targets, list) and targets and all(isinstance(name, str) and name for name in targets)
        if targets != "all-linear" and not names:
            raise ValueError(f"must be all-linear or a non-empty list of module names, got {targets!r}")
        return targets


class RopeScalingSection(Section):
    """Rotary positions stretched to longer documents: arguments of `hf_longctx.models.rope_scaling.scale_rope`."""

    rope_type: str
    """linear, yarn or llama3"""
    factor: float = Field(strict=False, allow_inf_nan=False)
    """context after scaling / context of pretraining"""
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    """context of pretraining, in tokens; null: what the model's configuration says"""
    beta_fast: float | None = Field(default=None, strict=False)
    """yarn: rotations in the pretrained context above which a frequency is kept"""
    beta_slow: float | None = Field(default=None, strict=False)
    """yarn: rotations below which a frequency is divided by the factor"""
    attention_factor: float | None = Field(default=None, strict=False)
    """yarn: what scores are sharpened by"""
    low_freq_factor: float | None = Field(default=None, strict=False)
    """llama3: wavelengths above original / low_freq_factor are stretched by the factor"""
    high_freq_factor: float | None = Field(default=None, strict=False)
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
    rope_scaling: RopeScalingSection | None = None
    """stretch rotary positions to longer documents; saved in the checkpoint"""
    freeze: list[str] | None = Field(default=None, min_length=1)
    """parameters that stay as they are: names of parameters or modules, with shell wildcards"""
    lora: LoraSection | None = Field(default=None, validate_default=True)
    """train adapters, and save only them; all else is frozen. {} for the defaults"""
    load_in_4bit: bool = False
    """QLoRA: the frozen weights are held in 4 bits (NF4); needs lora, CUDA and the package bitsandbytes"""

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
    def _known_embedded(cls, path: str | None) -> str | None:
        if path and path.startswith("embedded:") and path != EMBEDDED_MODEL:
            raise ValueError(f"the only embedded model is {EMBEDDED_MODEL}, got {path!r}")
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


ANY_SPLIT = "(all)"
"""Of a source that has none: it is trained on."""


def _existing(path: Any, info: ValidationInfo) -> str | dict[str, list[str]]:
    """A directory or a name as it is; files by split."""
    if isinstance(path, str) and path:
        if path == EMBEDDED_DATA or Path(path).is_dir() or _names_a_hub(path):
            return path
        if path.startswith("embedded:"):
            raise ValueError(f"the only embedded data set is {EMBEDDED_DATA}, got {path!r}")
    given = path if isinstance(path, dict) else {info.data.get("train_split", ANY_SPLIT): path}
    by_split = {}
    for split, files in given.items():
        names = [files] if isinstance(files, str) else files
        if not (isinstance(split, str) and isinstance(names, list) and names):
            raise ValueError(f"must be a path, a non-empty list of paths, or split -> path(s), got {path!r}")
        by_split[split] = [found for name in names for found in _files(name)]
    return by_split


def _names_a_hub(path: str) -> bool:
    """org/name, and nothing that looks like a file."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)) and Path(path).suffix not in FILE_KINDS


def _files(given: Any) -> list[str]:
    """The files that a name or wildcard stands for, sorted."""
    is_name = isinstance(given, str) and Path(given).suffix in FILE_KINDS
    found = sorted(glob.glob(given, recursive=True)) if is_name and not Path(given).is_file() else [given]
    if not is_name or not found or not all(Path(each).is_file() for each in found):
        raise ValueError(
            f"must be {EMBEDDED_DATA}, an existing directory, a hub's org/name, or existing files that end in "
            f"{', '.join(FILE_KINDS)}, got {given!r} (relative to {Path.cwd()})"
        )
    return found


def _saved_by_datasets(directory: Path) -> bool:
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()


def _saved_splits(directory: Path) -> list[str] | None:
    """Splits of what `save_to_disk` or `hf-longctx prepare` wrote; one data set alone is the split train. None: another
    layout, or a hub's."""
    if (several := directory / "dataset_dict.json").is_file():
        return json.loads(several.read_text())["splits"]
    if (directory / "state.json").is_file() or (directory / "index.arrow").is_file():
        return ["train"]
    return sorted(index.parent.name for index in directory.glob("*/index.arrow")) or None


Documents = Annotated[str | dict[str, list[str]], BeforeValidator(_existing), Field(min_length=1)]
Passes = Annotated[float, Field(strict=False, ge=0, le=1000)]
Weights = Annotated[
    list[Passes], BeforeValidator(lambda given: given if isinstance(given, list) else [given]), Field(min_length=1)
]


class SourceKeys(Section):
    """How rows become documents, and how many of them."""

    name: str | None = Field(default=None, min_length=1)
    """for reports; null: the path"""
    subset: str | None = None
    """of a hub's data set that has several"""
    documents: Literal["rows", "files", "directories"] = "rows"
    """of a directory of files: each file is a document, or each directory; rows: files hold documents as rows"""
    pattern: str = "**/*"
    """of a directory of files: which of them"""
    kind: Literal["auto", "text", "messages", "prompt_completion", "tokens"] = "auto"
    """what a row holds; auto: as its columns are named (input_ids; messages; prompt and completion; text)"""
    text_column: str | None = None
    """column of texts, tokenised with the model's tokenizer; null: text"""
    train_on: Literal["assistant", "all"] = "assistant"
    """of conversations: learn what the assistant (or the completion) says, or everything"""
    max_documents: int | None = Field(default=None, gt=0)
    """only its first"""
    max_tokens: int | None = Field(default=None, gt=0)
    """only its first documents that together have no more tokens"""
    weight: Weights = [1.0]
    """how often each document is seen in an epoch: 0.5: half of them, drawn anew each epoch; a list: one for each epoch, the
    last goes on"""


class SourceSection(SourceKeys):
    """One source of a mixture."""

    path: Documents
    """a directory (a data set, or files); files, by name or wildcard: one, a list, or a mapping from split to file(s); the id of
    a data set on a hub; embedded:python-sources. Relative to the current directory."""

    @property
    def splits(self) -> list[str] | None:
        """Names of the splits; None: not known without asking a hub, or without looking at what files are called."""
        if isinstance(self.path, dict):
            return list(self.path)
        if self.path == EMBEDDED_DATA:
            return list(EMBEDDED_SPLITS)
        return _saved_splits(Path(self.path)) if self.documents == "rows" else [ANY_SPLIT]


class DataConfig(SourceKeys):
    """Which documents are trained on and evaluated: one source, or a mixture of `sources`."""

    train_split: str = "train"
    """the split trained on; files given without a split belong to it"""
    eval_split: str | None = None
    """the held-out split; null: no evaluation"""
    path: Documents | None = Field(default=None)
    """one source: embedded:python-sources, a directory, files (one, a list, or a mapping from split to file(s)), or the id of
    a data set on a hub. Relative to the current directory. Once validated, files are split -> list of files."""
    sources: list[SourceSection] | None = Field(default=None, min_length=1)
    """a mixture: each with its own path and the keys of one source"""
    bad_rows: Literal["error", "skip"] = "error"
    """rows that cannot be read or tokenised: an error, or left out, counted and listed"""
    workers: int | None = Field(default=None, gt=0)
    """processes that tokenise; null: one for each processor, for 64 MiB or more; 1: the tokenizer's own threads"""
    on_the_fly: bool = False
    """of one source that lies as Arrow already (saved by datasets, or a hub's): keep only lengths, which Ray measures, and
    tokenise a document whenever it is read; for data that are too large to be stored once more"""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what does not go together."""
        if self.path is None and self.sources is None:
            yield "path", "missing: give path (one source) or sources (a mixture)"
            return
        if self.sources is not None:
            for name in sorted(self.model_fields_set & (SourceKeys.model_fields.keys() | {"path"})):
                if getattr(self, name) is not None:
                    yield name, "stands beside data.sources, which are a mixture: give each source its own"
        if self.on_the_fly:
            for name, value in (("sources", self.sources), ("max_tokens", self.max_tokens)):
                if value is not None:
                    yield name, "on_the_fly takes one source, and all of its rows or the first max_documents"
            if self.documents != "rows":
                yield "documents", f"on_the_fly needs rows, got {self.documents!r}"
            if self.path == EMBEDDED_DATA:
                yield "path", f"{EMBEDDED_DATA} is tokenised already: remove on_the_fly"
            elif isinstance(self.path, dict) or (
                self.path is not None and Path(self.path).is_dir() and not _saved_by_datasets(Path(self.path))
            ):
                yield (
                    "path",
                    "on_the_fly reads what lies as Arrow already: a directory by save_to_disk of datasets, or a hub's data "
                    "set. Files are prepared: remove on_the_fly",
                )
            if set(self.weight) != {1.0}:
                yield "weight", f"on_the_fly sees every document once in an epoch, got {self.weight}"
        for name in ("train_split", "eval_split"):
            split = getattr(self, name)
            valid = {split} if name == "eval_split" else {split, ANY_SPLIT}
            known = [source.splits for source in self.all_sources]
            if split is not None and not any(there is None or valid & set(there) for there in known):
                names = dict.fromkeys(repr(each) for there in known for each in there or [])
                yield name, f"no source has the split {split!r}, only {', '.join(names)}"

    @property
    def all_sources(self) -> list[SourceSection]:
        if self.sources is not None:
            return self.sources
        keys = {name: getattr(self, name) for name in SourceKeys.model_fields}
        return [SourceSection.model_construct(path=self.path, **keys)]


class LongctxConfig(Section):
    """Documents to ranks: arguments of LongContextPlugin. What is null, the plugin decides (or its environment)."""

    capacity: int = Field(ge=0)
    """tokens that one rank holds in one micro-batch; a document of s tokens is split over s / capacity ranks or more. 0: what
    the device's memory holds"""
    global_batch_documents: int | None = Field(default=None, gt=0)
    """documents per optimizer step, all ranks together"""
    global_batch_tokens: int | None = Field(default=None, gt=0)
    """tokens per optimizer step, all ranks together: a batch is closed before exceeding it"""
    long_documents: Literal["error", "truncate", "split", "drop"] | None = None
    """what becomes of documents longer than longest_document: refused, cut off, made into several documents, or left out"""
    longest_document: int | None = Field(default=None, gt=1)
    """tokens; null: what all ranks together hold at first launch"""
    overlap_tokens: int | None = Field(default=None, ge=0)
    """with split: tokens by which each piece begins before the end of the one before it; there they are context only"""
    loader: Literal["local", "ray"] | None = None
    """who plans steps and reads documents: each rank for itself (local), or one planner and some document servers (ray)"""
    ray_address: str | None = Field(default=None, min_length=1)
    """host:port of the Ray to join; null: one is started on this machine, and listens to it alone"""
    ray_servers: int | None = Field(default=None, gt=0)
    """actors that read documents"""
    loss_chunk_tokens: int | None = Field(default=None, gt=0)
    """tokens whose logits exist at the same time in the cross-entropy"""
    ulysses_degree: int | None = Field(default=None, gt=0)
    """most ranks among which the heads of a document are split; it must divide the attention heads"""
    keep_last_slice: bool | None = None
    """keep the keys and values received last for backward: one exchange less, for memory"""
    planner: Literal["hdp", "static_cp", "dp_packing", "bytescale_naive", "bytescale_balanced"] | None = None
    """who holds what: ours, or one of the ways it is compared with"""
    kernel: (
        Literal["auto", "flash_attn_3", "flash_attn_4", "flash_attn_2", "cuda_varlen", "cpu_flash", "reference"] | None
    ) = None
    """attention kernel; auto takes the fast one of the device, and never a slow one silently"""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """ranks on each machine, where the launcher does not say"""
    profile: str | None = Field(default=None, min_length=1)
    """file that `hf-longctx profile` wrote on this hardware; null: a preset's speeds"""
    recalibrate_steps: int | None = Field(default=None, ge=0)
    """steps after which ranks agree anew on how long things take, from what was measured; 0: never"""
    sharding: Literal["auto", "ddp", "zero1", "zero2", "zero3"] | None = None
    """what each rank holds of weights, gradients and optimizer: all (ddp), or a part of the optimizer (zero1), of gradients
    too (zero2), of weights too (zero3)"""
    keep_attention: Literal["auto", "always", "never"] | None = None
    """with activation checkpointing: keep attention's output for backward, or compute it again"""
    activation_offload: float | None = Field(default=None, ge=0, le=1, strict=False)
    """share of the kept activations that waits in host memory between forward and backward"""
    plan_offload: bool | None = None
    """plans may use host memory to put documents on fewer ranks; needs a profile"""
    mlp_tile_tokens: int | None = Field(default=None, ge=0)
    """tokens of which an MLP's inner activations exist at once; 0: all of a micro-batch"""
    compile_layers: bool | None = None
    """torch.compile what does not depend on the layout"""
    liger_kernels: bool | None = None
    """use Liger's kernels on CUDA where the package liger-kernel is installed"""
    async_save: bool | None = None
    """write checkpoints while training goes on"""
    stall_timeout_seconds: float | None = Field(default=None, gt=0, strict=False)
    """a rank that has not moved for so long ends, after saying who is waited for"""
    grace_seconds: float | None = Field(default=None, gt=0, strict=False)
    """after SIGTERM: how long saving a checkpoint and leaving may take"""

    @field_validator("global_batch_tokens")
    @classmethod
    def _one_batch_size(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        documents = info.data.get("global_batch_documents")
        if tokens is not None and documents is not None:
            raise ValueError(
                f"longctx.global_batch_documents ({documents}) and longctx.global_batch_tokens ({tokens}) both set the "
                "global batch: keep one, and set the other to null"
            )
        return tokens


class Config(Section):
    """A whole run."""

    model: ModelConfig
    """the model to train"""
    data: DataConfig
    """the documents to train on"""
    longctx: LongctxConfig
    """how documents are spread over ranks"""
    training: dict[str, Any] = {}
    """fields of transformers.TrainingArguments"""
