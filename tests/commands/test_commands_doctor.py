"""`hf-longctx doctor`: what it finds wrong, and what it measures between ranks."""

import ctypes
import errno
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_longctx.cli import main
from hf_longctx.commands.preflight import health
from hf_longctx.commands.preflight.links import Link, judged, measure, read_links
from hf_longctx.commands.shared.ranks import on_ranks
from hf_longctx.settings.gpu_environment import (
    GPU_ENVIRONMENT,
    OVERLAPPING_DRIVER,
    cuda_driver,
    kernels_one_at_a_time,
    lacking,
    set_for_gpus,
)


def oddities(findings: Iterator[health.Finding]) -> dict[str, tuple[str, str]]:
    """Text of what is not right -> level, remedy."""
    return {finding.text: (finding.level, finding.remedy) for finding in findings if finding.level != "ok"}


@pytest.mark.parametrize(
    ("variables", "level", "text", "remedy"),
    [
        ({"WORLD_SIZE": "4"}, "problem", "WORLD_SIZE=4 without MASTER_ADDR, MASTER_PORT, RANK", "unset WORLD_SIZE"),
        ({"RANK": "1"}, "problem", "RANK=1 without WORLD_SIZE", "unset RANK"),
        ({"OMP_NUM_THREADS": "many"}, "problem", "OMP_NUM_THREADS='many'", "OMP_NUM_THREADS=1"),
        ({"OMP_NUM_THREADS": "8", "LOCAL_WORLD_SIZE": "4"}, "warning", "for each of 4 processes", "OMP_NUM_THREADS=2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "warning", "OMP_NUM_THREADS is not set", "OMP_NUM_THREADS=2"),
        ({"TOKENIZERS_PARALLELISM": "false"}, "note", "TOKENIZERS_PARALLELISM is off", "data.workers"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "CUDA_LAUNCH_BLOCKING=1", "unset CUDA_LAUNCH_BLOCKING"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "does not use NVLink", "unset NCCL_P2P_DISABLE"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "does not use InfiniBand", "unset NCCL_IB_DISABLE"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "warning", "other machines cannot be reached", "ip addr"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "warning", "no GPU is seen", "unset CUDA_VISIBLE_DEVICES"),
        ({"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "a"}, "warning", "are both set", "keep one"),
        ({}, "note", "PYTORCH_ALLOC_CONF is not set: memory may fragment", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a"}, "note", "without expandable_segments:True", "expandable_segments:True"),
        ({}, "note", "NCCL_LAUNCH_ORDER_IMPLICIT is not set", "export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        ({}, "note", "CUDA_DEVICE_MAX_CONNECTIONS is not set", "export CUDA_DEVICE_MAX_CONNECTIONS=32"),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "warning",
            "(3 times)",
            "TORCH_DIS",
        ),
        ({"HF_LONGCTX_CAPACTY": "1"}, "problem", "HF_LONGCTX_CAPACTY is no setting; did you mean 'capacity'?", "unset"),
        ({"HF_LONGCTX_CAPACITY": "1"}, "note", "HF_LONGCTX_CAPACITY=1", "unset"),
    ],
)
def test_each_oddity_of_the_environment_has_a_remedy(variables, level, text, remedy):
    remedies = oddities(health.environment(variables, cuda=True, processors=8))
    (match,) = [line for line in remedies if text in line]
    assert remedies[match][0] == level
    assert remedy in remedies[match][1]


ONE_CONNECTION, OLD_DRIVER = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: a GPU runs its kernels in",
    "the driver is of CUDA 12.2, before 12.3",
)
REMEDY = {ONE_CONNECTION: "unset it", OLD_DRIVER: "install a newer driver"}


@pytest.mark.parametrize(
    ("variables", "driver", "warned"),
    [
        ({}, OVERLAPPING_DRIVER, []),
        ({}, None, []),
        ({}, 12020, [OLD_DRIVER]),  # a run sets the order of launches
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, 12020, [OLD_DRIVER]),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, 12020, []),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 13000, [ONE_CONNECTION]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 12020, [ONE_CONNECTION, OLD_DRIVER]),
    ],
)
def test_kernels_that_run_one_at_a_time_are_named_with_what_they_cost(variables, driver, warned):
    """Agrees with what a run decides by (stage_links.py), and is silent without a GPU."""
    remedies = oddities(health.environment(variables, cuda=True, processors=8, driver=driver))
    named = [text for text in remedies if "stages of a pipeline receive in the order of all tasks" in text]
    assert len(named) == len(warned)
    for text, start in zip(named, warned):
        level, remedy = remedies[text]
        assert text.startswith(start)
        assert level == "warning"
        assert remedy.startswith(REMEDY[start])
    in_a_run = {**variables, **lacking(variables)}
    assert kernels_one_at_a_time(in_a_run, OVERLAPPING_DRIVER if driver is None else driver) == bool(warned)
    without = oddities(health.environment(variables, cuda=False, processors=8, driver=driver))
    assert not [text for text in without if text in named]


@pytest.mark.processes
def test_the_driver_is_asked_where_torch_sees_a_gpu(tmp_path, monkeypatch):
    """A library answers as CUDA's does; benchmarks/gpu_acceptance.py asks a real one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_driver() is None
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 12020; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(library) if name == "libcuda.so.1" else name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cuda_driver() == 12020


def test_a_cache_whose_parent_cannot_be_entered_is_a_finding(tmp_path, monkeypatch):
    """The administrator, as whom tests may run, enters any folder."""
    is_folder = Path.is_dir

    def refused(path: Path) -> bool:
        if path.is_relative_to(tmp_path / "locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_folder(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "locked" / "cache"))
    assert f"{tmp_path / 'locked' / 'cache'} cannot be written" in oddities(health.disks())


def test_a_run_on_gpus_sets_what_nobody_has_set():
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    added = set_for_gpus(variables)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert added == {name: variables[name] for name in GPU_ENVIRONMENT if name in added}
    assert set(GPU_ENVIRONMENT) - set(added) == {"CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"}
    assert not any(
        name in text for text in oddities(health.environment(variables, cuda=True, processors=8)) for name in variables
    )


def test_a_process_is_given_what_it_lacks(monkeypatch):
    """os.environ takes no question about anything but text, unlike a dictionary."""
    for name in GPU_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is as before when this test is over
        monkeypatch.delenv(name)
    assert set(set_for_gpus(os.environ)) == set(GPU_ENVIRONMENT)
    assert all(os.environ[name] == value for name, (value, _) in GPU_ENVIRONMENT.items())


def test_a_clean_environment_has_nothing_to_say():
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "OMP_NUM_THREADS": "4"}
    assert not oddities(health.environment({**launched, "HF_HOME": "x"}, cuda=False, processors=8))


def test_versions_are_compared_with_the_ranges_of_the_package(monkeypatch):
    versions = {"torch": "2.9.0", "rich": None}

    def version(name: str) -> str:
        if versions.get(name, "") is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    remedies = oddities(health.versions())
    (torch,) = [line for line in remedies if line.startswith("torch 2.9.0, supported are ")]
    assert remedies[torch][0] == "problem"
    assert remedies[torch][1].startswith("pip install 'torch")
    assert remedies["rich is not installed"][0] == "problem"
    assert not [line for line in remedies if line.startswith(("numpy", "transformers"))]


def test_small_limits_and_full_disks_are_named(monkeypatch, tmp_path):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1048576))
    remedies = oddities(health.limits())
    assert remedies["256 open files at most (ulimit -n); 4096 are better"] == ("warning", "ulimit -n 4096")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 * 2**20, free=2**30))
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "not" / "there"))
    remedies = oddities(health.disks())
    assert any(text.startswith("1.0 GiB are free for prepared data") for text in remedies)
    assert any(text.startswith("/dev/shm holds 64 MiB") for text in remedies) or not Path("/dev/shm").is_dir()


@pytest.mark.processes
def test_ranks_measure_their_links(tmp_path):
    on_ranks(measure, tmp_path / "links.json", ranks=2, cpu=True)
    (link,) = read_links(tmp_path / "links.json")
    assert (link.distance, link.between_nodes) == (1, False)
    assert len(link.bandwidth) == len(link.latency) == 2
    assert all(math.isfinite(number) and number > 0 for number in [*link.bandwidth, *link.latency])


def test_slow_links_are_named():
    def levels(links: list[Link], device: str) -> list[str]:
        return [finding.level for finding in judged(links, device)]

    even, uneven = Link(1, False, [9e9, 9e9], [1e-5] * 2), Link(1, False, [9e9, 3e9], [1e-5] * 2)
    assert levels([even, uneven], "cpu") == ["ok", "warning"]
    assert levels([even], "NVIDIA H100 80GB HBM3") == ["warning"]
    assert levels([Link(1, False, [300e9] * 2, [1e-5] * 2)], "NVIDIA H100 80GB HBM3") == ["ok"]
    assert levels([even], "NVIDIA GH200 480GB") == ["ok"], "its links are not an H200's"
    assert levels([Link(8, True, [40e9] * 2, [1e-5] * 2)], "NVIDIA H100 80GB HBM3") == ["ok"]
    assert "process 1 is the slowest" in next(judged([uneven], "cpu")).text


def test_a_problem_is_the_exit_code(capsys, monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_CAPACTY", "1")
    assert main(["doctor", "--ranks", "1", "--cpu"]) == 1
    shown = capsys.readouterr().out
    assert "problem HF_LONGCTX_CAPACTY is no setting" in shown
    assert "-> unset HF_LONGCTX_CAPACTY" in shown
    assert "one process alone sends to nobody" in shown
    assert "Kernel of each feature:" in shown
