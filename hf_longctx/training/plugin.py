"""LongContextPlugin: how documents are spread over ranks, as accelerate's plugins are given: arguments, or
environment variables.

`accelerate launch` forwards the environment to its workers, so HF_LONGCTX_CAPACITY=32768 accelerate launch ... is
enough.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from pydantic import ValidationError

from hf_longctx.hardware.devices import gpu_speed
from hf_longctx.hardware.profile import CalibrationError, Profile
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner import CostModel, CpuKind, Topology
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.sections.kinds import broken_rule, shown
from hf_longctx.sections.longctx import LongctxConfig

PREFIX = "HF_LONGCTX_"
OPTIONAL = (
    *("global_batch_documents", "global_batch_tokens", "longest_document", "ranks_per_node"),
    *("ray_address", "profile"),
)
"""Fields that may be None."""
Problem = tuple[str, str]
"""A setting of the plugin or of TrainingArguments ("": none), and the rule that its value breaks."""


class PluginError(ValueError):
    """All that is wrong with a plugin's values, at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("LongContextPlugin: " + "; ".join(f"{key}: {rule}" if key else rule for key, rule in problems))


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
            rule = f"the environment variable {variable}={text!r} is not a valid {parse.__name__.strip('_')}"
            raise PluginError([(name, rule)]) from None

    return field(default_factory=read)


@dataclass
class LongContextPlugin:
    """Settings of Hybrid Data Parallelism. Each field but `cost` defaults to the environment variable
    HF_LONGCTX_<FIELD>.

    Types and ranges are those of the section `longctx` of a YAML file (sections/longctx.py), which checks the values.

    Raises:
        PluginError: all that is wrong, at once: the field, its value, what would be valid. Unknown HF_LONGCTX_
            variables too. It is a ValueError.
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
    """who holds what; those that `hdp` is compared with (hf_longctx.planner.PLANNERS) are for comparisons only"""
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
    """file that `hf-longctx profile` wrote on this hardware: how fast it is. Default: what is known of the device's name"""
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
        if isinstance(self.profile, os.PathLike):
            self.profile = os.fspath(self.profile)
        problems = self._refused_by_section()
        if not any(key == "profile" for key, _ in problems):
            problems += self._refused_with_profile()
        if self.cost is not None and not isinstance(self.cost, CostModel):
            problems.append(("cost", f"must be a CostModel or None, got {shown(self.cost)}"))
        names = {PREFIX + f.name.upper() for f in fields(self) if f.name != "cost"} | {PREFIX + "CACHE"}
        unknown = sorted(v for v in os.environ if v.startswith(PREFIX) and v not in names)
        if unknown:
            problems.append(
                ("", f"unknown environment variables {', '.join(unknown)}; valid: {', '.join(sorted(names))}")
            )
        if problems:
            raise PluginError([(key, rule + self._from_where(key)) for key, rule in problems])

    def _refused_by_section(self) -> list[Problem]:
        """Ask the section `longctx` of a YAML file about the same values: types, ranges, and what does not go together."""
        values = {name: getattr(self, name) for name in LongctxConfig.model_fields}
        problems = [
            (name, "must not be None: leave it out for the default")
            for name, value in values.items()
            if value is None and name not in OPTIONAL
        ]
        try:
            section = LongctxConfig.model_validate(values)
        except ValidationError as error:
            refused = [(str(detail["loc"][0]), detail) for detail in error.errors(include_url=False)]
            return problems + [(key, broken_rule(detail)) for key, detail in refused if values[key] is not None]
        for name in LongctxConfig.model_fields:
            setattr(self, name, getattr(section, name))  # a number that YAML reads as text, 1e-1, is one here too
        return problems or list(section.problems())

    def _refused_with_profile(self) -> list[Problem]:
        if self.profile is None:
            return []
        if self.cost is not None:
            return [("profile", f"{self.profile!r} and cost both say how long things take: keep one")]
        try:
            profile = Profile.load(self.profile)
        except CalibrationError as error:
            return [("profile", str(error))]
        if self.plan_offload and profile.host_bandwidth <= 0:
            said = (
                f"{self.plan_offload!r} needs to know how fast host memory is, and host_bandwidth is "
                f"{profile.host_bandwidth} in {self.profile!r}: measure again with `hf-longctx profile`"
            )
            return [("plan_offload", said)]
        return []

    def _from_where(self, key: str) -> str:
        """Name the environment variable that a refused value came from."""
        variable = PREFIX + key.upper()
        text = os.environ.get(variable)
        is_it = text is not None and str(getattr(self, key, None)).lower() == text.strip().lower()
        return f" (environment variable {variable})" if is_it else ""

    def cost_model(
        self,
        model: Any,
        topology: Topology,
        device: torch.device,
        autocast: bool = False,
        cpu: CpuKind | None = None,
        gpu: str | None = None,
    ) -> CostModel:
        """`cost`; else FLOPs and bytes of the model's configuration, at the speeds of `profile`, or of a preset for the
        dtype in which the model computes (its own, or autocast's).

        Args:
            cpu: kind of the processors, where they compute; the same on all ranks. None: this machine's.
            gpu: name of the device, where it is none of these; the same on all ranks. None, or one without a preset: an A100's
                speeds.
        """
        if self.cost is not None:
            return self.cost
        weights = whole_parameters(model)  # all stages of a pipeline plan the same
        half = autocast or next(iter(weights.values())).element_size() == 2
        on_gpu = gpu_speed(gpu) if half else replace(gpu_speed(gpu), activation_bytes=4)
        speed = cpu_core(cpu or cpu_kind(), half) if device.type == "cpu" else on_gpu
        if self.profile is not None:
            speed = Profile.load(self.profile).speed
        cost = CostModel.from_config(
            model.config.get_text_config(),
            speed,
            ranks_per_node=topology.ranks_per_node,
            world_size=topology.world_size,
        )
        trained = sum(each.numel() for each in weights.values() if each.requires_grad)  # an adapter's are few
        elsewhere = sum(each.numel() for each in weights.values()) - sum(each.numel() for each in model.parameters())
        return replace(cost, step_ns=cost.step_ns * trained // (model.num_parameters() + elsewhere))

    def first_longest_document(self, ranks: int) -> int | None:
        """Tokens at which a run that begins now on `ranks` ranks cuts long documents; None: nothing is cut."""
        if self.longest_document is None and self.long_documents != "error":
            return self.capacity * ranks
        return self.longest_document
