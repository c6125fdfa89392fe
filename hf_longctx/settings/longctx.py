"""Settings of Hybrid Data Parallelism: how documents are spread over ranks.

LongctxConfig declares each once: type, range, default and meaning. It is the section `longctx` of a YAML file. In Python the same
settings are LongContextPlugin's, as accelerate's plugins are given: arguments, or environment variables. `accelerate launch`
forwards the environment to its workers, so HF_LONGCTX_CAPACITY=32768 accelerate launch ... is enough. docs/settings.md and the
JSON schema are made of the same declaration (commands/shared/reference.py).
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hf_longctx.hardware.profile import CalibrationError, Profile
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.memory.state_bytes import IN_ROUNDS
from hf_longctx.planner.topology import Documents
from hf_longctx.settings.fields import Number, Problem, Section, Tokens, beside, broken_rule

ADDRESS = re.compile(r"[^\s:]+:\d{1,5}")
COMPARED = ("static_cp", "static_cp_unpacked", "dynamic_cp", "dp_packing", "bytescale_naive", "bytescale_balanced")
"""Planners that ours is compared with, and that no training run may name (hf_longctx.planner.PLANNERS)."""
IN_PARTS = ("zero1", "zero2", "zero3")
"""Settings of sharding for which FSDP2 holds what each rank has."""
OF_EMBEDDINGS = 1e-6
"""PEFT's learning rate of adapters on embeddings, with LoRA+."""
PREFIX = "HF_LONGCTX_"
"""Beginning of the environment variable of each setting."""
OTHER_VARIABLES = (f"{PREFIX}CACHE", f"{PREFIX}BROWSER")
"""Variables with this prefix that are no setting's: where prepared documents and the embedded model lie; the browser of tests."""

FileName = Annotated[str, BeforeValidator(lambda given: os.fspath(given) if isinstance(given, os.PathLike) else given)]


class LongctxConfig(Section):
    """How documents are spread over ranks: arguments of LongContextPlugin. What is left out or null is taken from the environment
    variable, `HF_LONGCTX_CAPACITY` for `capacity`, else it is the default."""

    capacity: Tokens = Field(default=0, ge=0)
    """tokens that one rank holds in one micro-batch; a document of s tokens is split over s / capacity ranks or more. Where the
    model's layers carry a state along a document, it stays whole on a rank and has at most so many. 0: what the device's memory
    holds beside weights, gradients and optimizer (on CPUs, `device_bytes` of the profile)"""
    global_batch_documents: int | None = Field(default=None, gt=0)
    """documents per optimizer step, all ranks together"""
    global_batch_tokens: Tokens | None = Field(default=None, gt=0)
    """or: most tokens per optimizer step, all ranks together; a batch is closed before exceeding it. With neither:
    per_device_train_batch_size * ranks * gradient_accumulation_steps documents"""
    long_documents: Literal["error", "truncate", "split", "drop"] = "error"
    """what becomes of documents longer than `longest_document`: `error` names one and stops; `truncate` keeps the beginning;
    `split` makes documents of their own of its pieces; `drop` leaves them out. What is lost is counted in one warning"""
    longest_document: Tokens | None = Field(default=None, gt=1)
    """tokens; null: what all ranks together hold at first launch, or one rank where the model's documents stay whole, and no more
    than the model has positions for. Kept in the checkpoint: a resumed run, on any number of ranks, cuts where the first launch
    did"""
    overlap_tokens: Tokens = Field(default=0, ge=0)
    """with `split`: tokens by which each piece begins before the end of the one before it; there they are context only, so
    that no label is learned twice and none is lost"""
    loader: Literal["local", "ray"] = "local"
    """who plans steps and reads documents: each rank for itself (`local`), or one planner and some document servers for all
    (`ray`, `pip install 'hf_longctx[ray]'`): the same steps, bit for bit"""
    ray_address: str | None = Field(default=None, min_length=1)
    """host:port of the Ray to join; null: one is started on this machine, and listens to it alone"""
    ray_servers: int = Field(default=1, gt=0)
    """actors that read documents; every machine with one must see the prepared data"""
    loss_chunk_tokens: Tokens = Field(default=0, ge=0)
    """tokens whose logits exist at the same time in the cross-entropy; 0: 1024, and on a GPU up to 4096 where a full micro-batch
    takes no more memory so, because it is fuller in its layers"""
    token_metrics: bool = False
    """log `mean_token_accuracy` and `entropy` (nats) of the tokens that have labels, in training and, with `eval_`, in
    evaluation: exact over ranks, from the logits that the cross-entropy has at hand"""
    ulysses_degree: int = Field(default=1, gt=0)
    """most ranks among which the heads of a document are split; it must divide the attention heads. A micro-batch of n ranks
    uses gcd(n, degree), so short documents still communicate nothing; what remains goes by direct exchange"""
    keep_last_slice: bool = False
    """keep the keys and values that each layer received last for backward: one exchange less, for memory"""
    planner: Literal["hdp"] = "hdp"
    """who holds what; the planners that `hdp` is [compared with](planner.md) are for comparisons only"""
    kernel: Literal[
        "auto",
        "flash_attn_3",
        "flash_attn_4",
        "flash_attn_2",
        "cuda_varlen",
        "cuda_efficient",
        "cpu_flash",
        "tiled",
        "reference",
    ] = "auto"
    """attention kernel; `auto` takes the fast one of the device, and never a slow one silently (`hf-longctx kernels`)"""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """ranks on each machine, where the launcher does not say (srun, mpirun): keys that several of them need come from another
    machine once"""
    profile: FileName | None = Field(default=None, min_length=1)
    """file that `hf-longctx profile` wrote on this hardware, the same on all ranks; null: the speeds known of the device's
    name, else an A100's (said once)"""
    recalibrate_steps: int = Field(default=50, ge=0)
    """steps after which ranks agree anew on how long things take, and on how fast each of them is, from what was measured;
    plans change where that differs by more than 5 %. 0: never. Where ranks meet in every layer (`zero2`, `zero3`, experts,
    stages), each waits for the slowest, so nothing is learned"""
    sharding: Literal["auto", "ddp", "zero1", "zero2", "zero3"] = "auto"
    """what each rank holds of weights, gradients and optimizer: all (`ddp`), or a part of the optimizer (`zero1`), of
    gradients too (`zero2`), of weights too (`zero3`). `auto`: what accelerate's FSDP2 settings say, else `ddp`; see
    [sharding](sharding.md)"""
    host_offload: bool = False
    """with `zero1`, `zero2` or `zero3`: each rank's part of weights, gradients and optimizer waits in host memory, where the
    optimizer steps (FSDP2's CPU offload): slower, and the device holds activations and what is gathered"""
    pipeline_stages: int = Field(default=1, gt=0)
    """processes that share the layers of a Llama, Mistral or Mixtral one after another; documents are spread over the ranks of
    each. It divides the number of processes; with sharding `ddp` or `zero1`; see [pipelines](how_to/pipeline.md)"""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """in which order stages run forwards and backwards"""
    virtual_stages: int = Field(default=1, gt=0)
    """with `interleaved`: runs of layers on each process"""
    keep_attention: Literal["auto", "always", "never"] = "auto"
    """with activation checkpointing: keep attention's output for backward (`always`), compute it and its exchange again
    (`never`), or keep it where that saves more time than the rest of the layer takes (`auto`)"""
    activation_offload: Number = Field(default=0.0, ge=0, le=1)
    """share of the kept activations that waits in host memory between forward and backward, in every micro-batch"""
    plan_offload: bool = False
    """plans may put a document on fewer ranks than its activations need, which exchange less; the rest waits in host memory
    while its transfer hides behind compute. Needs a `profile`; not with `zero2` and `zero3`"""
    mlp_tile_tokens: Tokens = Field(default=0, ge=0)
    """tokens of which an MLP's inner activations exist at once; 0: all of a micro-batch"""
    compile_layers: bool = False
    """torch.compile what does not depend on the layout: norm and projections before attention, projection and MLP after"""
    liger_kernels: bool = True
    """use Liger's kernels on CUDA where the package liger-kernel is installed"""
    loraplus_lr_ratio: Number | None = Field(default=None, ge=1, le=1024)
    """LoRA+ (arXiv 2402.12354): the B of adapters learns at so many times `training.learning_rate`, at which A does; 16 is usual,
    and 1024 at a rate of 1e-4 is 0.1 already; null: both learn alike. Beside `model.lora`"""
    loraplus_lr_embedding: Number = Field(default=OF_EMBEDDINGS, gt=0)
    """with it: the learning rate of adapters on embeddings"""
    async_save: bool = True
    """write checkpoints while training goes on, from a copy in host memory"""
    connect_peers: bool = False
    """ranks of several nodes exchange a first message before training; NCCL connects two ranks when they first meet, which holds
    both up. Ranks of one node always do. Takes as long as there are ranks"""
    stall_timeout_seconds: Number = Field(default=1800.0, gt=0)
    """a rank that has not moved for so long ends (exit code 75), after saying who is waited for: rank, step, micro-batch, layer;
    see [lasting runs](lasting_runs.md)"""
    grace_seconds: Number = Field(default=120.0, gt=0)
    """after SIGTERM: how long saving a checkpoint and leaving may take. What sends the signal may not wait so long: torchrun
    sends SIGKILL after 30 s"""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}

    @field_validator("global_batch_tokens")
    @classmethod
    def _one_batch_size(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        documents = info.data.get("global_batch_documents")
        if tokens is not None and documents is not None:
            raise ValueError(
                f"longctx.global_batch_documents ({documents}) and longctx.global_batch_tokens ({tokens}) both set the global "
                "batch: keep one, and set the other to null"
            )
        return tokens

    @field_validator("planner", mode="before")
    @classmethod
    def _trains(cls, planner: Any) -> Any:
        if planner in COMPARED:
            raise ValueError(
                f"must be 'hdp', or left out, got {planner!r}, which only `hf-longctx plan` and benchmarks/planner.py take, to "
                "compare. A run that began with it resumes with 'hdp'"
            )
        return planner

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what does not go together."""
        yield from self._pieces()
        yield from self._ray()
        yield from self._pipeline()
        yield from self._offload()
        if self.host_offload and self.sharding not in IN_PARTS:
            yield (
                "host_offload",
                f"true needs sharding {', '.join(IN_PARTS)}, which FSDP2 holds in parts, got {self.sharding!r}",
            )
        if self.loraplus_lr_embedding != OF_EMBEDDINGS and self.loraplus_lr_ratio is None:
            yield (
                "loraplus_lr_embedding",
                f"{self.loraplus_lr_embedding:g} needs loraplus_lr_ratio, which turns LoRA+ on",
            )
        if self.profile is not None and not Path(self.profile).is_file():
            yield (
                "profile",
                f"must be a file that `hf-longctx profile` wrote, got {self.profile!r}{beside(self.profile)}",
            )

    def _pieces(self) -> Iterator[tuple[str, str]]:
        overlap, longest = self.overlap_tokens, self.longest_document
        if overlap and self.long_documents != "split":
            yield "overlap_tokens", f"{overlap} needs long_documents: split, got {self.long_documents!r}"
        elif longest is not None and overlap >= longest:
            yield "overlap_tokens", f"{overlap} must be less than longest_document ({longest}): the rest is learned"

    def _pipeline(self) -> Iterator[tuple[str, str]]:
        schedule, virtual = self.pipeline_schedule, self.virtual_stages
        if (schedule == "interleaved") != (virtual > 1):
            yield (
                "pipeline_schedule",
                f"{schedule!r} with virtual_stages ({virtual}): interleaved takes 2 or more, the others 1",
            )
        if self.pipeline_stages > 1:
            return
        for name, default in (("pipeline_schedule", "1f1b"), ("virtual_stages", 1)):
            if (value := getattr(self, name)) != default:
                yield (
                    name,
                    f"{value!r} with pipeline_stages (1): there is no pipeline; valid: {name} {default}, or more stages",
                )

    def _ray(self) -> Iterator[tuple[str, str]]:
        for name, value in (("ray_address", self.ray_address), ("ray_servers", self.ray_servers - 1)):
            if value and self.loader != "ray":
                yield name, f"{getattr(self, name)!r} needs loader: ray, got {self.loader!r}"
        if self.ray_address is not None and not ADDRESS.fullmatch(self.ray_address):
            yield "ray_address", f"must be host:port, got {self.ray_address!r}; for instance '10.0.0.1:6379'"

    def _offload(self) -> Iterator[tuple[str, str]]:
        if not self.plan_offload:
            return
        if self.profile is None:
            yield (
                "plan_offload",
                "true needs longctx.profile, which knows how fast host memory is (`hf-longctx profile`)",
            )
        if self.activation_offload:
            yield (
                "plan_offload",
                f"true and activation_offload ({self.activation_offload}) both say what waits in host memory: keep one",
            )
        if self.sharding in IN_ROUNDS:
            yield (
                "plan_offload",
                f"true with sharding {self.sharding!r}, whose steps are planned in rounds: use activation_offload, or zero1",
            )


class PluginError(ValueError):
    """All that is wrong with a plugin's values, at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("LongContextPlugin: " + "; ".join(f"{key}: {rule}" if key else rule for key, rule in problems))


class LongContextPlugin(LongctxConfig):
    """Settings of Hybrid Data Parallelism. What is not given, or None, is taken from the environment variable,
    `HF_LONGCTX_CAPACITY` for `capacity`, else it is the default.

    Raises:
        PluginError: all that is wrong, at once: the field, its value, what would be valid. Unknown fields and unknown HF_LONGCTX_
            variables too. It is a ValueError.
    """

    cost: InstanceOf[CostModel] | None = None
    """predicts times, which balance plans; default: counted from the model's configuration, with the profile's speeds. No
    environment variable, and no key of a file"""

    def __init__(self, **given: Any) -> None:
        read = {name: value for name, value in _environment().items() if given.get(name) is None}
        problems: list[Problem] = []
        try:
            super().__init__(**given | read)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                problems.append((str(detail["loc"][0]), broken_rule(detail, type(self).model_fields)))
        else:
            problems += self.problems()
        if unknown := sorted(name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES):
            known = ", ".join(sorted(VARIABLES))
            problems.append(("", f"unknown environment variables {', '.join(unknown)}; valid: {known}"))
        if problems:
            raise PluginError(
                [
                    (key, f"{rule} (environment variable {PREFIX}{key.upper()})" if key in read else rule)
                    for key, rule in problems
                ]
            )

    def changed(self, **changes: Any) -> Self:
        """Return the same settings with some changed, checked as new ones are; None: the environment's value or the default."""
        now = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**now | changes)

    def problems(self) -> Iterator[Problem]:
        """Setting and rule of what does not go together, the profile's content included."""
        wrong = list(super().problems())
        yield from wrong
        if self.profile is None or any(key == "profile" for key, _ in wrong):
            return
        if self.cost is not None:
            yield "profile", f"{self.profile!r} and cost both say how long things take: keep one"
            return
        try:
            profile = Profile.load(self.profile)
        except CalibrationError as error:
            yield "profile", str(error)
            return
        if self.plan_offload and profile.host_bandwidth <= 0:
            yield (
                "plan_offload",
                f"{self.plan_offload!r} needs to know how fast host memory is, and host_bandwidth is "
                f"{profile.host_bandwidth} in {self.profile!r}: measure again with `hf-longctx profile`",
            )

    def first_longest_document(
        self, ranks: int, documents: Documents = "split", positions: int | None = None
    ) -> int | None:
        """Return the tokens at which a run that begins now on `ranks` ranks cuts long documents; None: nothing is cut.

        Args:
            documents: how they may lie on ranks; one that stays whole is no longer than one rank's capacity.
            positions: tokens of the longest document that the model has positions for; None: any.
        """
        if self.longest_document is None and self.long_documents != "error":
            room = self.capacity * (ranks if documents == "split" else 1)
            return room if positions is None else min(room, positions)
        return self.longest_document


VARIABLES = (*(f"{PREFIX}{name.upper()}" for name in LongctxConfig.model_fields), *OTHER_VARIABLES)
"""All environment variables with the prefix that mean something."""
SWITCHES = {"true": True, "false": False, "1": True, "0": False}
"""Values of a variable for a switch."""


def _environment() -> dict[str, Any]:
    """Return the settings that environment variables give."""
    texts = {name: os.environ.get(PREFIX + name.upper()) for name in LongctxConfig.model_fields}
    return {name: _read(name, text) for name, text in texts.items() if text is not None}


def _read(name: str, text: str) -> Any:
    """Read a value as its setting takes it; text that is nothing of the kind stays text, which the setting refuses."""
    kinds = _kinds(LongctxConfig.model_fields[name].annotation)
    if str in kinds:
        return text
    if bool in kinds:
        return SWITCHES.get(text.lower(), text)
    for number in (int, float):
        if number in kinds or float in kinds:
            with suppress(ValueError):
                return number(text)
    return text


def _kinds(annotation: Any) -> set[type]:
    """Return the plain types that a value may have: those of an optional one, and of the choices of a Literal."""
    parts = get_args(annotation)
    if not parts:
        return {annotation if isinstance(annotation, type) else type(annotation)}
    return set().union(*map(_kinds, parts))
