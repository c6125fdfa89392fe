"""The section `longctx`: how documents are spread over ranks. Its keys are the fields of training's LongContextPlugin."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from hf_longctx.sections.kinds import Number, Section, beside

ADDRESS = re.compile(r"[^\s:]+:\d{1,5}")
COMPARED = ("static_cp", "dp_packing", "bytescale_naive", "bytescale_balanced")
"""Planners that training runs could name once (hf_longctx.planner.PLANNERS)."""


class LongctxConfig(Section):
    """Documents to ranks: arguments of LongContextPlugin. What is null, the plugin decides (or its environment)."""

    capacity: int = Field(ge=0)
    """tokens that one rank holds in one micro-batch; a document of s tokens is split over s / capacity ranks or more. 0: what
    the device's memory holds beside weights, gradients and optimizer (on CPUs, `device_bytes` of the profile)"""
    global_batch_documents: int | None = Field(default=None, gt=0)
    """documents per optimizer step, all ranks together"""
    global_batch_tokens: int | None = Field(default=None, gt=0)
    """or: most tokens per optimizer step, all ranks together; a batch is closed before exceeding it. With neither:
    per_device_train_batch_size * ranks * gradient_accumulation_steps documents"""
    long_documents: Literal["error", "truncate", "split", "drop"] | None = None
    """what becomes of documents longer than `longest_document`: `error` names one and stops; `truncate` keeps the beginning;
    `split` makes documents of their own of its pieces; `drop` leaves them out. What is lost is counted in one warning"""
    longest_document: int | None = Field(default=None, gt=1)
    """tokens; null: what all ranks together hold at first launch. Kept in the checkpoint: a resumed run, on any number of
    ranks, cuts where the first launch did"""
    overlap_tokens: int | None = Field(default=None, ge=0)
    """with `split`: tokens by which each piece begins before the end of the one before it; there they are context only, so
    that no label is learned twice and none is lost"""
    loader: Literal["local", "ray"] | None = None
    """who plans steps and reads documents: each rank for itself (`local`), or one planner and some document servers for all
    (`ray`, `pip install 'hf_longctx[ray]'`): the same steps, bit for bit"""
    ray_address: str | None = Field(default=None, min_length=1)
    """host:port of the Ray to join; null: one is started on this machine, and listens to it alone"""
    ray_servers: int | None = Field(default=None, gt=0)
    """actors that read documents; every machine with one must see the prepared data"""
    loss_chunk_tokens: int | None = Field(default=None, gt=0)
    """tokens whose logits exist at the same time in the cross-entropy"""
    ulysses_degree: int | None = Field(default=None, gt=0)
    """most ranks among which the heads of a document are split; it must divide the attention heads. A micro-batch of n ranks
    uses gcd(n, degree), so short documents still communicate nothing; what remains goes by direct exchange"""
    keep_last_slice: bool | None = None
    """keep the keys and values that each layer received last for backward: one exchange less, for memory"""
    planner: Literal["hdp"] | None = None
    """who holds what; the planners that `hdp` is [compared with](planner.md) are for comparisons only"""
    kernel: (
        Literal["auto", "flash_attn_3", "flash_attn_4", "flash_attn_2", "cuda_varlen", "cpu_flash", "reference"] | None
    ) = None
    """attention kernel; `auto` takes the fast one of the device, and never a slow one silently (`hf-longctx kernels`)"""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """ranks on each machine, where the launcher does not say (srun, mpirun): keys that several of them need come from another
    machine once"""
    profile: str | None = Field(default=None, min_length=1)
    """file that `hf-longctx profile` wrote on this hardware, the same on all ranks; null: the speeds known of the device's
    name, else an A100's (said once)"""
    recalibrate_steps: int | None = Field(default=None, ge=0)
    """steps after which ranks agree anew on how long things take, and on how fast each of them is, from what was measured;
    plans change where that differs by more than 5 %. 0: never"""
    sharding: Literal["auto", "ddp", "zero1", "zero2", "zero3"] | None = None
    """what each rank holds of weights, gradients and optimizer: all (`ddp`), or a part of the optimizer (`zero1`), of
    gradients too (`zero2`), of weights too (`zero3`). `auto`: what accelerate's FSDP2 settings say, else `ddp`; see
    [sharding](sharding.md)"""
    pipeline_stages: int | None = Field(default=None, gt=0)
    """processes that share the layers of a Llama, Mistral or Mixtral one after another; documents are spread over the ranks of
    each. It divides the number of processes; with sharding `ddp` or `zero1`; see [pipelines](how_to/pipeline.md)"""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] | None = None
    """in which order stages run forwards and backwards"""
    virtual_stages: int | None = Field(default=None, gt=0)
    """with `interleaved`: runs of layers on each process"""
    keep_attention: Literal["auto", "always", "never"] | None = None
    """with activation checkpointing: keep attention's output for backward (`always`), compute it and its exchange again
    (`never`), or keep it where that saves more time than the rest of the layer takes (`auto`)"""
    activation_offload: Number | None = Field(default=None, ge=0, le=1)
    """share of the kept activations that waits in host memory between forward and backward, in every micro-batch"""
    plan_offload: bool | None = None
    """plans may put a document on fewer ranks than its activations need, which exchange less; the rest waits in host memory
    while its transfer hides behind compute. Needs a `profile`; not with `zero2` and `zero3`"""
    mlp_tile_tokens: int | None = Field(default=None, ge=0)
    """tokens of which an MLP's inner activations exist at once; 0: all of a micro-batch"""
    compile_layers: bool | None = None
    """torch.compile what does not depend on the layout: norm and projections before attention, projection and MLP after"""
    liger_kernels: bool | None = None
    """use Liger's kernels on CUDA where the package liger-kernel is installed"""
    async_save: bool | None = None
    """write checkpoints while training goes on, from a copy in host memory"""
    stall_timeout_seconds: Number | None = Field(default=None, gt=0)
    """a rank that has not moved for so long ends (exit code 75), after saying who is waited for: rank, step, micro-batch, layer;
    see [lasting runs](lasting_runs.md)"""
    grace_seconds: Number | None = Field(default=None, gt=0)
    """after SIGTERM: how long saving a checkpoint and leaving may take. What sends the signal may not wait so long: torchrun
    sends SIGKILL after 30 s"""

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
        if self.profile is not None and not Path(self.profile).is_file():
            yield (
                "profile",
                f"must be a file that `hf-longctx profile` wrote, got {self.profile!r}{beside(self.profile)}",
            )

    def _pieces(self) -> Iterator[tuple[str, str]]:
        overlap, longest = self.overlap_tokens or 0, self.longest_document
        if overlap and self.long_documents != "split":
            yield "overlap_tokens", f"{overlap} needs long_documents: split, got {self.long_documents or 'error'!r}"
        elif longest is not None and overlap >= longest:
            yield "overlap_tokens", f"{overlap} must be less than longest_document ({longest}): the rest is learned"

    def _pipeline(self) -> Iterator[tuple[str, str]]:
        schedule, virtual = self.pipeline_schedule or "1f1b", self.virtual_stages or 1
        if (schedule == "interleaved") != (virtual > 1):
            yield (
                "pipeline_schedule",
                f"{schedule!r} with virtual_stages ({virtual}): interleaved takes 2 or more, the others 1",
            )
        if virtual > 1 and (self.pipeline_stages or 1) == 1:
            yield "virtual_stages", f"{virtual} with pipeline_stages (1): there is no pipeline"

    def _ray(self) -> Iterator[tuple[str, str]]:
        for name, value in (("ray_address", self.ray_address), ("ray_servers", (self.ray_servers or 1) - 1)):
            if value and self.loader != "ray":
                yield name, f"{getattr(self, name)!r} needs loader: ray, got {self.loader or 'local'!r}"
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
        if self.sharding in ("zero2", "zero3"):
            yield (
                "plan_offload",
                f"true with sharding {self.sharding!r}, whose steps are planned in rounds: use activation_offload, or zero1",
            )
