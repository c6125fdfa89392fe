"""Checks of `hf-longctx doctor` on one machine: versions, devices, environment variables, limits of the system, disks.

Each check yields findings: what there is, whether that is right, and what to do where it is not. Nothing is changed, and
nothing is sent.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
EXTRAS = ("cuda", "report", "ray", "demo")
"""Optional packages that a user may want; others are for developers."""
OPEN_FILES = 4096
"""Shards, sockets and workers of a rank: 1024, the usual default, ends long runs with "too many open files"."""
MAPPINGS = 65530
"""Linux's default; memory-mapped Arrow files and CUDA's expandable segments need as many."""
SHARED_MEMORY = GIB
"""Least size of /dev/shm: loaders' workers and NCCL pass tensors through it, and containers have 64 MiB."""
CACHE = 10 * GIB
"""Free on the disk of the cache: prepared data are 8 bytes a token, and less in 32 bits."""
BUSY_SHARE = 0.1
"""Share of a GPU's memory that other programs may hold before it is reported."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "note", "warning", "problem"]
    text: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    """Python and packages against the ranges that this package is tested with (its own metadata)."""
    import platform
    from importlib.metadata import PackageNotFoundError, metadata, requires

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        python, wanted = metadata("hf_longctx")["Requires-Python"], requires("hf_longctx") or []
    except PackageNotFoundError:
        yield Finding("note", "hf_longctx is not installed: its supported ranges are unknown", "pip install -e .")
        return
    if platform.python_version() not in SpecifierSet(python):
        yield Finding("problem", f"Python {platform.python_version()}, supported are {python}", "make another venv")
    else:
        yield Finding("ok", f"Python {platform.python_version()} ({python})")
    for requirement in map(Requirement, wanted):
        if requirement.name == "hf_longctx":
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement, "")
            continue
        extra = next((name for name in EXTRAS if requirement.marker.evaluate({"extra": name})), None)
        if extra is not None:
            yield _package(requirement, extra)


def _package(wanted: Any, extra: str) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    name, supported = wanted.name, str(wanted.specifier)
    try:
        installed = version(name)
    except PackageNotFoundError:
        if not extra:
            return Finding("problem", f"{name} is not installed", f"pip install '{name}{supported}'")
        return Finding("note", f"{name} is not installed, which is optional", f"pip install 'hf_longctx[{extra}]'")
    if not wanted.specifier.contains(installed, prereleases=True):
        return Finding("problem", f"{name} {installed}, supported are {supported}", f"pip install '{name}{supported}'")
    return Finding("ok", f"{name} {installed} ({supported})")


def devices() -> Iterator[Finding]:
    """GPUs, or processors and memory."""
    import torch

    from hf_longctx.commands.shared.ranks import cores
    from hf_longctx.precision import decide_here

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", f"{cores()} processors, {memory / GIB:.0f} GiB of memory")
    if not torch.cuda.is_available():
        if list(Path("/dev").glob("nvidia[0-9]*")):
            built = torch.version.cuda
            what = f"torch {torch.__version__} is built {f'for CUDA {built}' if built else 'without CUDA'}"
            yield Finding(
                "problem",
                f"there are NVIDIA devices, and torch sees none: {what}",
                "install a torch for the driver that nvidia-smi shows (pytorch.org), and look at CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Finding("note", "no GPU: training runs on processors (training.use_cpu: true)")
            decision = decide_here(torch.device("cpu"))
            yield Finding("ok", f"training.bf16: auto computes in {decision.computes} here: {decision.reason}")
        return
    count = torch.cuda.device_count()
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        name = (
            f"GPU {number}: {properties.name}, {total / GIB:.0f} GiB, capability {properties.major}.{properties.minor}"
        )
        if total - free > BUSY_SHARE * total:
            yield Finding("warning", f"{name}; {(total - free) / GIB:.1f} GiB are taken", "nvidia-smi shows by whom")
        elif properties.major < 8:
            yield Finding(
                "warning",
                f"{name}: no bfloat16",
                "training.fp16 instead of bf16; bf16: auto is float32 there",
            )
        else:
            yield Finding("ok", name)
    apart = [
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        yield Finding(
            "warning",
            f"GPUs {apart[0][0]} and {apart[0][1]} cannot read each other's memory ({len(apart)} such pairs)",
            "nvidia-smi topo -m; in a virtual machine or container, ask for NVLink or PCIe peer access",
        )


def environment(
    variables: Mapping[str, str], *, cuda: bool, processors: int, driver: int | None = None
) -> Iterator[Finding]:
    """Variables that break a run, or slow it down unnoticed. `driver`: CUDA's version that the GPUs' driver has, 12030 for 12.3;
    None: there is none."""
    ranks = int(variables.get("LOCAL_WORLD_SIZE") or variables.get("WORLD_SIZE") or 1)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name not in variables]
    if "WORLD_SIZE" in variables and missing:
        yield Finding(
            "problem",
            f"WORLD_SIZE={variables['WORLD_SIZE']} without {', '.join(missing)}: processes would wait for each other for ever",
            "unset WORLD_SIZE, or start with torchrun or accelerate launch, which set all of them",
        )
    if "RANK" in variables and "WORLD_SIZE" not in variables:
        yield Finding("problem", f"RANK={variables['RANK']} without WORLD_SIZE", "unset RANK, or start with torchrun")
    threads = variables.get("OMP_NUM_THREADS")
    if threads is not None and not threads.isdigit():
        yield Finding("problem", f"OMP_NUM_THREADS={threads!r} is no number", "export OMP_NUM_THREADS=1")
    elif threads is not None and int(threads) * ranks > processors:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={threads} for each of {ranks} processes, on {processors} processors: they take turns",
            f"export OMP_NUM_THREADS={max(1, processors // ranks)}",
        )
    elif threads is None and ranks > 1:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS is not set: each of {ranks} processes starts a thread for every processor",
            f"export OMP_NUM_THREADS={max(1, processors // ranks)}",
        )
    if variables.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "no"):
        yield Finding(
            "note",
            "TOKENIZERS_PARALLELISM is off: one process tokenises with one thread",
            "unset it; data.workers says how many processes tokenise",
        )
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_USE_CUDA_DSA", "NCCL_BLOCKING_WAIT", "TORCH_DISTRIBUTED_DEBUG"):
        if variables.get(name, "0").upper() not in ("0", "OFF", ""):
            yield Finding("warning", f"{name}={variables[name]} is for finding faults, and slow", f"unset {name}")
    yield from _memory_settings(variables, cuda)
    if cuda:
        yield from _kernels_beside_each_other(variables, driver)
    yield from _network(variables)
    yield from _ours(variables)


def _kernels_beside_each_other(variables: Mapping[str, str], driver: int | None) -> Iterator[Finding]:
    """Yield what makes a GPU run one kernel of NCCL's at a time, as a run would find it (stage_links.py)."""
    from hf_longctx.settings.gpu_environment import GPU_ENVIRONMENT, OVERLAPPING_DRIVER, kernels_one_at_a_time, lacking

    cost = (
        "a message that waits for its peer holds up all that were started after it, so that little travels beside compute, and "
        "stages of a pipeline receive in the order of all tasks"
    )
    many = GPU_ENVIRONMENT[CONNECTIONS][0]
    if variables.get(CONNECTIONS) == "1":
        yield Finding(
            "warning",
            f"{CONNECTIONS}=1: a GPU runs its kernels in the order of their launch; {cost}",
            f"unset it, or export {CONNECTIONS}={many}",
        )
    as_in_a_run = {**variables, **lacking(variables), CONNECTIONS: many}
    if driver is not None and kernels_one_at_a_time(as_in_a_run, driver):
        yield Finding(
            "warning",
            f"the driver is of CUDA {_of_cuda(driver)}, before {_of_cuda(OVERLAPPING_DRIVER)}: with NCCL_LAUNCH_ORDER_IMPLICIT="
            f"{as_in_a_run['NCCL_LAUNCH_ORDER_IMPLICIT']} NCCL runs one kernel at a time; {cost}",
            "install a newer driver (nvidia-smi shows this one's); leave NCCL's order on, without which it promises no end",
        )


def _of_cuda(version: int) -> str:
    """12030 -> "12.3"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _memory_settings(variables: Mapping[str, str], cuda: bool) -> Iterator[Finding]:
    from hf_longctx.settings.gpu_environment import GPU_ENVIRONMENT, lacking

    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    allocator_settings = {name: variables[name] for name in names if name in variables}
    if len(allocator_settings) == 2:
        yield Finding(
            "warning", "PYTORCH_ALLOC_CONF and its older name PYTORCH_CUDA_ALLOC_CONF are both set", "keep one"
        )
    if cuda:
        for name, value in lacking(variables).items():
            yield Finding(
                "note",
                f"{name} is not set: {GPU_ENVIRONMENT[name][1]} (`hf-longctx train` sets it)",
                f"in other programs: export {name}={value}",
            )
        if allocator_settings and not any("expandable_segments:True" in value for value in allocator_settings.values()):
            yield Finding(
                "note",
                f"{', '.join(allocator_settings)} without expandable_segments:True: {GPU_ENVIRONMENT['PYTORCH_ALLOC_CONF'][1]}",
                "export PYTORCH_ALLOC_CONF=expandable_segments:True",
            )
    if variables.get("CUDA_VISIBLE_DEVICES") == "":
        yield Finding("warning", "CUDA_VISIBLE_DEVICES is empty: no GPU is seen", "unset CUDA_VISIBLE_DEVICES")


def _network(variables: Mapping[str, str]) -> Iterator[Finding]:
    off = {"NCCL_P2P_DISABLE": "NVLink and PCIe", "NCCL_SHM_DISABLE": "shared memory", "NCCL_IB_DISABLE": "InfiniBand"}
    for name, what in off.items():
        if variables.get(name, "0") not in ("0", ""):
            yield Finding("warning", f"{name}={variables[name]}: NCCL does not use {what}", f"unset {name}")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if variables.get(name, "").strip("=") == "lo":
            yield Finding(
                "warning", f"{name}=lo: other machines cannot be reached", f"unset {name}, or name the card (ip addr)"
            )
    if variables.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield Finding("note", f"NCCL_DEBUG={variables['NCCL_DEBUG']} prints much", "unset NCCL_DEBUG, or WARN")
    restarts, kept = variables.get("TORCHELASTIC_MAX_RESTARTS", "0"), variables.get("TORCHELASTIC_USE_AGENT_STORE")
    if restarts not in ("0", "") and kept == "True":
        yield Finding(
            "warning",
            f"the launcher may start this job again ({restarts} times) with the store of dead processes",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        )


def _ours(variables: Mapping[str, str]) -> Iterator[Finding]:
    from hf_longctx.settings.fields import did_you_mean
    from hf_longctx.settings.longctx import OTHER_VARIABLES, PREFIX, VARIABLES

    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        if name not in VARIABLES:
            near = did_you_mean(name.removeprefix(PREFIX), [known.removeprefix(PREFIX).lower() for known in VARIABLES])
            yield Finding("problem", f"{name} is no setting{near}", f"unset {name}")
        elif name not in OTHER_VARIABLES:
            yield Finding("note", f"{name}={variables[name]}: set wherever a file says nothing", f"unset {name}")


def limits() -> Iterator[Finding]:
    """Yield the limits of this process and of the kernel."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < OPEN_FILES:
        can = f"ulimit -n {min(OPEN_FILES, most)}" if most > files else "nofile in /etc/security/limits.conf"
        yield Finding("warning", f"{files} open files at most (ulimit -n); {OPEN_FILES} are better", can)
    else:
        yield Finding("ok", f"{files} open files at most (ulimit -n)")
    mappings = Path("/proc/sys/vm/max_map_count")
    if mappings.is_file():
        count = int(mappings.read_text())
        if count < MAPPINGS:
            yield Finding("warning", f"vm.max_map_count is {count}", f"sysctl -w vm.max_map_count={MAPPINGS}")
        else:
            yield Finding("ok", f"vm.max_map_count is {count}")


def disks() -> Iterator[Finding]:
    """Room where data and tensors go."""
    from hf_longctx.data.cache import default_cache_dir

    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        if total < SHARED_MEMORY:
            yield Finding(
                "warning",
                f"/dev/shm holds {total / 2**20:.0f} MiB: workers of data loaders and NCCL fail without a clear word",
                "docker run --shm-size=16g, or --ipc=host; training.dataloader_num_workers: 0 needs none",
            )
        else:
            yield Finding("ok", f"/dev/shm holds {total / GIB:.1f} GiB")
    cache = default_cache_dir()
    try:
        existing_folder = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        free, writable = shutil.disk_usage(existing_folder).free, os.access(existing_folder, os.W_OK)
    except OSError:  # a folder above it cannot be entered
        free, writable = 0, False
    if not writable:
        yield Finding("problem", f"{cache} cannot be written", "export HF_LONGCTX_CACHE=/a/folder/of/yours")
    elif free < CACHE:
        yield Finding(
            "warning",
            f"{free / GIB:.1f} GiB are free for prepared data ({cache})",
            "export HF_LONGCTX_CACHE=/a/larger/disk, or make room",
        )
    else:
        yield Finding("ok", f"{free / GIB:.0f} GiB are free for prepared data ({cache})")
