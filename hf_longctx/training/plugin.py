"""LongContextPlugin: how documents are spread over ranks, as accelerate's plugins are given: arguments, or
environment variables.

`accelerate launch` forwards the environment to its workers, so HF_LONGCTX_CAPACITY=32768 accelerate launch ... is
enough.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from hf_longctx.attention.kernels import KERNELS
from hf_longctx.data.long_documents import POLICIES
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner import GPU, PLANNERS, CostModel, CpuKind, Topology
from hf_longctx.planner.calibration import CalibrationError, Profile
from hf_longctx.planner.memory import SHARDING
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.training.activations import KEEP_ATTENTION

PREFIX = "HF_LONGCTX_"
OPTIONAL = ("global_batch_documents", "global_batch_tokens", "longest_document", "ranks_per_node")
"""Counts that may be left out."""

LOADERS = ("local", "ray")
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


def _from_environment(name: str, parse: Callable[[str], Any], default: Any) -> Any:
    """A dataclass field that defaults to HF_LONGCTX_<NAME>, parsed, or to `default` where that is not set."""

    def read() -> Any:
        variable = PREFIX + name.upper()
        text = os.environ.get(variable)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError:
            raise ValueError(
                f"the environment variable {variable}={text!r} is not a valid {parse.__name__.strip('_')}"
            ) from None

    return field(default_factory=read)


@dataclass
class LongContextPlugin:
    """Settings of Hybrid Data Parallelism. Each field but `cost` defaults to the environment variable
    HF_LONGCTX_<FIELD>.

    Raises:
        ValueError: all that is wrong, at once: the field, its value, what would be valid. Unknown HF_LONGCTX_
            variables too.
    """

    capacity: int = _from_environment("capacity", int, 0)
    """most tokens that a rank holds in one micro-batch. A document of s tokens needs ceil(s / capacity) ranks. 0: what the
    device's memory holds (on CPUs, the profile's)"""
    global_batch_documents: int | None = _from_environment("global_batch_documents", int, None)
    """documents of one optimizer step, all ranks together"""
    global_batch_tokens: int | None = _from_environment("global_batch_tokens", int, None)
    """or: most tokens of one optimizer step. With neither: per_device_train_batch_size * processes * accumulation
    documents"""
    long_documents: str = _from_environment("long_documents", str, "error")
    """what becomes of documents longer than `longest_document`: `error` refuses them, `truncate` keeps their beginnings,
    `split` makes several documents of each, `drop` leaves them out (data/long_documents.py says what is lost)"""
    longest_document: int | None = _from_environment("longest_document", int, None)
    """tokens. Default: what all ranks together hold at first launch, capacity * ranks; a resumed run keeps its own"""
    overlap_tokens: int = _from_environment("overlap_tokens", int, 0)
    """with `split`: tokens by which each piece begins before the end of the one before it; there they are context only"""
    loader: str = _from_environment("loader", str, "local")
    """who plans steps and reads documents: `local`, each rank for itself; `ray`, one planner and some document servers for all
    (data/remote/), which gives the same steps, bit for bit"""
    ray_address: str | None = _from_environment("ray_address", str, None)
    """host:port of the Ray to join. Default: one that is started on this machine and listens to it alone"""
    ray_servers: int = _from_environment("ray_servers", int, 1)
    """actors that read documents"""
    pipeline_stages: int = _from_environment("pipeline_stages", int, 1)
    """processes that share the layers of a model one after another; documents are spread over the ranks of each"""
    pipeline_schedule: str = _from_environment("pipeline_schedule", str, "1f1b")
    """in which order stages run forwards and backwards (planner/stages.py): `1f1b`, `gpipe`, or `interleaved`"""
    virtual_stages: int = _from_environment("virtual_stages", int, 1)
    """with `interleaved`: runs of layers that each process has"""
    planner: str = _from_environment("planner", str, "hdp")
    """who holds what: `hdp`, or one of those it is compared with (hf_longctx.planner.PLANNERS)"""
    kernel: str = _from_environment("kernel", str, "auto")
    """attention kernel; see `hf_longctx.attention.kernels.select_kernel`"""
    loss_chunk_tokens: int = _from_environment("loss_chunk_tokens", int, 1024)
    """rows of logits that exist at once in the loss"""
    ulysses_degree: int = _from_environment("ulysses_degree", int, 1)
    """most ranks among which the heads of a document are split (Ulysses); it must divide the attention heads. A
    micro-batch of n ranks uses gcd(n, ulysses_degree), so that short documents still communicate nothing; 1: the direct
    exchange alone"""
    keep_last_slice: bool = _from_environment("keep_last_slice", _boolean, False)
    """also keep the keys and values that each layer received last, up to as many as its own: one exchange less in
    backward"""
    ranks_per_node: int | None = _from_environment("ranks_per_node", int, None)
    """ranks on each machine, between which bytes are cheap: keys that several of them need come from another machine
    once. Default: what the launcher says (LOCAL_WORLD_SIZE); srun and mpirun do not"""
    stall_timeout_seconds: float = _from_environment("stall_timeout_seconds", float, 1800.0)
    """a rank that has not moved for so long, whether it waits for others or not, says who is waited for and ends (exit code
    75), so that the launcher ends the job or starts it again. Notices come from 30 s on (training/watchdog.py); a rank
    that dies is noticed at once (gloo) or when the launcher ends the job (NCCL). TrainingArguments' ddp_timeout ends sums
    over all ranks earlier where it is shorter"""
    grace_seconds: float = _from_environment("grace_seconds", float, 120.0)
    """after SIGTERM training saves a checkpoint and leaves (exit code 143); a process that has not left after so long leaves
    without. What sends the signal ends a process with SIGKILL some time later itself, torchrun after 30 s"""
    profile: str | None = _from_environment("profile", str, None)
    """file that `hf-longctx profile` wrote on this hardware: how fast it is. Default: a preset's speeds"""
    recalibrate_steps: int = _from_environment("recalibrate_steps", int, 50)
    """after so many steps all ranks agree anew on how long things take, and on how fast each rank is, from what was
    measured; 0: never, plans then follow from the cost model alone"""
    sharding: str = _from_environment("sharding", str, "auto")
    """what each rank holds of weights, gradients and optimizer (training/sharding.py): `ddp` all; `zero1` a part of the
    optimizer; `zero2` of the gradients too; `zero3` of the weights too. `auto`: what accelerate's FSDP2 settings say
    (zero3, or zero2 where they do not reshard), else ddp"""
    keep_attention: str = _from_environment("keep_attention", str, "auto")
    """with activation checkpointing: `always` keeps each layer's attention output and recomputes only what is around it,
    `never` recomputes attention too, with its exchange; `auto` keeps it where that saves more time than the rest takes"""
    activation_offload: float = _from_environment("activation_offload", float, 0.0)
    """share of each layer's kept activations that waits in host memory between forward and backward, 0 to 1, in every
    micro-batch"""
    plan_offload: bool = _from_environment("plan_offload", _boolean, False)
    """plans may put a document on fewer ranks than its activations need, which exchange less, where the rest of them waits
    in host memory and its transfer hides behind compute. Needs a `profile`, which knows how fast that is; not with
    zero2, zero3 or expert parallelism, whose steps are planned in rounds"""
    mlp_tile_tokens: int = _from_environment("mlp_tile_tokens", int, 0)
    """tokens of which an MLP's inner activations exist at once; 0: all of a micro-batch"""
    compile_layers: bool = _from_environment("compile_layers", _boolean, False)
    """torch.compile what does not depend on the layout: norm and projections before attention, projection and MLP after"""
    liger_kernels: bool = _from_environment("liger_kernels", _boolean, True)
    """use Liger's kernels for norms, rotation and MLP on CUDA where the package liger-kernel is installed"""
    async_save: bool = _from_environment("async_save", _boolean, True)
    """training goes on while a checkpoint is written, from a copy in host memory of what this rank writes; False: it waits,
    and callbacks find the checkpoint complete in `on_save`"""
    cost: CostModel | None = None
    """predicts times, which balance plans; default: counted from the model's configuration, with the profile's speeds"""

    def __post_init__(self) -> None:
        problems = []
        for name in (
            "capacity",
            "loss_chunk_tokens",
            "ulysses_degree",
            "recalibrate_steps",
            "mlp_tile_tokens",
            "pipeline_stages",
            "virtual_stages",
            *OPTIONAL,
        ):
            value, optional = getattr(self, name), name in OPTIONAL
            if type(value) is not int and not (optional and value is None):
                problems.append(f"{name}={value!r} must be an integer" + (" or None" if optional else ""))
        for name in ("keep_last_slice", "plan_offload", "compile_layers", "liger_kernels", "async_save"):
            if type(getattr(self, name)) is not bool:
                problems.append(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.activation_offload, (int, float)) or not 0 <= self.activation_offload <= 1:
            problems.append(f"activation_offload={self.activation_offload!r} must be a share, from 0 to 1")
        for name in ("stall_timeout_seconds", "grace_seconds"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                problems.append(f"{name}={value!r} must be a finite number of seconds")
        if problems:
            raise ValueError("LongContextPlugin: " + "; ".join(problems))
        for name in (
            "loss_chunk_tokens",
            "ulysses_degree",
            "stall_timeout_seconds",
            "grace_seconds",
            "pipeline_stages",
            "virtual_stages",
        ):
            if getattr(self, name) <= 0:
                problems.append(f"{name}={getattr(self, name)} must be positive")
        if self.capacity < 0:
            problems.append(f"capacity={self.capacity} must be positive, or 0 for what the device's memory holds")
        for name in OPTIONAL:
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name}={value} must be at least 1")
        if self.mlp_tile_tokens < 0:
            problems.append(f"mlp_tile_tokens={self.mlp_tile_tokens} must be positive, or 0 for no tiles")
        for name, valid in (("sharding", ("auto", *SHARDING)), ("keep_attention", KEEP_ATTENTION)):
            if getattr(self, name) not in valid:
                problems.append(f"{name}={getattr(self, name)!r} is unknown; valid: {', '.join(valid)}")
        if self.recalibrate_steps < 0:
            problems.append(f"recalibrate_steps={self.recalibrate_steps} must be 0 (never) or more")
        if self.profile is not None and self.cost is not None:
            problems.append(f"profile={self.profile!r} and cost both say how long things take: keep one")
        elif self.profile is not None:
            try:
                profile = Profile.load(self.profile)
            except CalibrationError as error:
                problems.append(str(error))
            else:
                if self.plan_offload and profile.host_bandwidth <= 0:
                    problems.append(
                        f"plan_offload=True needs to know how fast host memory is, and host_bandwidth is "
                        f"{profile.host_bandwidth} in {self.profile!r}: measure again with `hf-longctx profile`"
                    )
        if self.plan_offload and self.profile is None:
            problems.append(
                "plan_offload=True needs a profile (`hf-longctx profile`), which knows how fast host memory is"
            )
        if self.plan_offload and self.activation_offload:
            problems.append(
                f"plan_offload=True and activation_offload={self.activation_offload} both say what waits in host memory: "
                "keep one"
            )
        if self.plan_offload and self.planner != "hdp":
            problems.append(f"plan_offload=True with planner={self.planner!r}, which plans none; valid: planner='hdp'")
        if self.longest_document == 1:
            problems.append(
                "longest_document=1 leaves no label: the first token of a document is predicted from nothing"
            )
        if self.long_documents not in POLICIES:
            problems.append(f"long_documents={self.long_documents!r} is unknown; valid: {', '.join(POLICIES)}")
        if self.loader not in LOADERS:
            problems.append(f"loader={self.loader!r} is unknown; valid: {', '.join(LOADERS)}")
        if self.ray_address is not None and self.loader != "ray":
            problems.append(
                f"ray_address={self.ray_address!r} with loader={self.loader!r}, which uses no Ray; valid: loader='ray'"
            )
        if self.ray_servers < 1:
            problems.append(f"ray_servers={self.ray_servers} must be at least 1")
        if self.overlap_tokens and self.long_documents != "split":
            problems.append(
                f"overlap_tokens={self.overlap_tokens} needs long_documents='split', got {self.long_documents!r}"
            )
        if self.overlap_tokens < 0 or (
            self.longest_document is not None and self.overlap_tokens >= self.longest_document
        ):
            problems.append(
                f"overlap_tokens={self.overlap_tokens} must be at least 0 and less than longest_document="
                f"{self.longest_document}: of each piece after the first, the rest is learned"
            )
        if self.global_batch_documents is not None and self.global_batch_tokens is not None:
            problems.append(
                f"global_batch_documents={self.global_batch_documents} and global_batch_tokens={self.global_batch_tokens} "
                "both set the global batch: keep one"
            )
        problems += self._pipeline_problems()
        if self.planner not in PLANNERS:
            problems.append(f"planner={self.planner!r} is unknown; valid: {', '.join(PLANNERS)}")
        if self.kernel != "auto" and self.kernel not in KERNELS:
            problems.append(f"kernel={self.kernel!r} is unknown; valid: auto, {', '.join(KERNELS)}")
        names = {PREFIX + f.name.upper() for f in fields(self) if f.name != "cost"} | {PREFIX + "CACHE"}
        unknown = sorted(v for v in os.environ if v.startswith(PREFIX) and v not in names)
        if unknown:
            problems.append(f"unknown environment variables {', '.join(unknown)}; valid: {', '.join(sorted(names))}")
        if problems:
            raise ValueError("LongContextPlugin: " + "; ".join(problems))

    def _pipeline_problems(self) -> list[str]:
        problems = []
        if self.pipeline_schedule not in PIPELINE_SCHEDULES:
            problems.append(
                f"pipeline_schedule={self.pipeline_schedule!r} is unknown; valid: {', '.join(PIPELINE_SCHEDULES)}"
            )
        elif (self.pipeline_schedule == "interleaved") != (self.virtual_stages > 1):
            problems.append(
                f"pipeline_schedule={self.pipeline_schedule!r} with virtual_stages={self.virtual_stages}: interleaved takes 2 or "
                "more, the others 1"
            )
        if self.virtual_stages > 1 and self.pipeline_stages == 1:
            problems.append(f"virtual_stages={self.virtual_stages} with pipeline_stages=1: there is no pipeline")
        return problems

    def cost_model(
        self,
        model: Any,
        topology: Topology,
        device: torch.device,
        autocast: bool = False,
        cpu: CpuKind | None = None,
    ) -> CostModel:
        """`cost`; else FLOPs and bytes of the model's configuration, at the speeds of `profile`, or of a preset for the
        dtype in which the model computes (its own, or autocast's).

        Args:
            cpu: kind of the processors, where they compute; the same on all ranks. None: this machine's.
        """
        if self.cost is not None:
            return self.cost
        weights = whole_parameters(model)  # all stages of a pipeline plan the same
        half = autocast or next(iter(weights.values())).element_size() == 2
        on_gpu = GPU if half else replace(GPU, activation_bytes=4)
        speed = cpu_core(cpu or cpu_kind(), half) if device.type == "cpu" else on_gpu
        if self.profile is not None:
            speed = Profile.load(self.profile).speed
        cost = CostModel.from_config(
            model.config, speed, ranks_per_node=topology.ranks_per_node, world_size=topology.world_size
        )
        trained = sum(each.numel() for each in weights.values() if each.requires_grad)  # an adapter's are few
        elsewhere = sum(each.numel() for each in weights.values()) - sum(each.numel() for each in model.parameters())
        return replace(cost, step_ns=cost.step_ns * trained // (model.num_parameters() + elsewhere))

    def first_longest_document(self, ranks: int) -> int | None:
        """Tokens at which a run that begins now on `ranks` ranks cuts long documents; None: nothing is cut."""
        if self.longest_document is None and self.long_documents != "error":
            return self.capacity * ranks
        return self.longest_document
