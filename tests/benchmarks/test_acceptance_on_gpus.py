"""The parts of the acceptance run (benchmarks/acceptance/) as on a GPU: stand-ins for torch.cuda do nothing or read a clock, and
tensors are on the CPU. It shows that calls and names are right, and which figures come of them.
"""

import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SECONDS = 60.0


class Event:
    """torch.cuda.Event, by a clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Everything has run."""

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.time - self.time)


class Stream:
    """torch.cuda.Stream: a place in a pool of 32."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream, self.priority = Stream.made % 32, priority
        Stream.made += 1

    def __enter__(self) -> None:
        """Calls within run as everywhere."""

    def __exit__(self, *error: Any) -> None:
        """Nothing changes."""

    def wait_stream(self, stream: "Stream") -> None:
        """It is done."""

    def wait_event(self, event: Event) -> None:
        assert event.time > 0, "nobody recorded it"


@pytest.fixture
def as_if_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench that takes the ways of a GPU, with tensors on the CPU."""
    from acceptance.record import Bench, Record

    class AsIf(Bench):
        @property
        def cuda(self) -> bool:
            return True

    def debug_mode(mode: str) -> None:
        if mode == "warn":
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    properties = SimpleNamespace(name="H100", total_memory=2**36, multi_processor_count=132, major=9, minor=0)
    stand_ins = {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": debug_mode,
        "device_count": lambda: 1,
        "get_device_properties": lambda number: properties,
        "memory_stats": lambda: {
            "num_alloc_retries": 0,
            "reserved_bytes.all.peak": 3,
            "allocated_bytes.all.peak": 2,
        },
        "empty_cache": lambda: None,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda: 2**30,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("acceptance.environment.shutil.which", lambda name: None)
    monkeypatch.setattr("acceptance.programs.run_program", lambda *_, **__: (0, "0 problem(s), 2 warning(s)"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return AsIf(torch.device("cpu"), True, SECONDS, tmp_path / "record.json", Record("part", "cuda"))


def test_what_only_a_gpu_runs(as_if_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch):
    from acceptance import environment, host_time, overlap, planned_step, real_ranks, step_memory
    from acceptance.record import NotPossibleError

    bench = as_if_on_a_gpu
    for measure in (environment.measure, host_time.measure, overlap.measure, planned_step.count_waits):
        measure(bench)
    step_memory.beside_model(bench)
    figures = bench.record.figures
    assert figures["streams/different ones of 100"] == 32
    assert figures["syncs/in a planned step"] == 3
    assert figures["environment/warnings of doctor"] == 2
    assert figures["memory/reserved over allocated"] == 1.5
    assert {"overlap/a spinning block/priority -1/wait", "overlap/attention forward/priority 0/hidden"} <= set(figures)
    with pytest.raises(NotPossibleError, match="was not set when torch was imported"):
        planned_step.sanitize(bench)
    with pytest.raises(NotPossibleError, match="it takes two GPUs, and 1 can be used here"):
        real_ranks.several(bench)

    def refuses(*_: Any) -> None:
        raise RuntimeError("ncclInvalidUsage ... Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 9000")

    monkeypatch.setattr(real_ranks, "launch", refuses)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)), raising=False)
    with pytest.raises(NotPossibleError, match=r"NCCL 2\.28\.9 refuses two ranks on one GPU"):
        real_ranks.shared(bench)
    assert real_ranks._reserved(lambda into: SimpleNamespace(wait=lambda: None), 8, torch.device("cpu")) == 0


def test_ranks_of_several_gpus_are_counted(as_if_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch):
    """Two ranks on one GPU of two; attention that is wrong ends the part after its figures are written."""
    from acceptance import real_ranks

    bench, error = as_if_on_a_gpu, {"value": 0.0}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def launch(function: Any, arguments: Any, ranks: int) -> Any:
        return [
            {
                "device": 0.0,
                "GB per second": 9.0 - rank,
                "GiB that NCCL takes": rank,
                "error of attention": error["value"],
            }
            for rank in range(ranks)
        ]

    monkeypatch.setattr(real_ranks, "launch", launch)
    real_ranks.several(bench)
    figures = bench.record.figures
    assert figures["several/devices over ranks"] == 0.5
    assert (figures["several/GB per second"], figures["several/GiB that NCCL takes"]) == (8.0, 1.0)
    error["value"] = 0.5
    with pytest.raises(RuntimeError, match=r"attention over 2 ranks is wrong by 5\.0e-01"):
        real_ranks.several(bench)


def test_models_that_are_wrong_end_their_part(as_if_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch):
    from acceptance import whole_models

    monkeypatch.setattr(whole_models, "compared", lambda case, device: (1e-5, 3e-2, 1e-5, 1e-2))
    with pytest.raises(RuntimeError, match=r"gradients are 3\.00 times as wrong"):
        whole_models.measure(as_if_on_a_gpu)
    assert as_if_on_a_gpu.record.figures["models/worst error of gradients over plain bfloat16's"] == pytest.approx(3.0)
