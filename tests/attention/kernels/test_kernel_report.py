"""The kernel report says what `select_kernel` does, and the command line prints it."""

import re

import pytest
import torch

from hf_longctx import cli
from hf_longctx.attention.kernels import KERNELS, AttentionCall, KernelError, flash_attn_packages, select_kernel
from hf_longctx.attention.kernels.report import FEATURES, faster_kernel, kernel_report


def rows(report: str, heading: str) -> list[tuple[str, str]]:
    """The two columns below a heading; a name left out repeats the one above."""
    lines = report.split(f"{heading}:\n")[1].split("\n\n")[0].splitlines()
    cells: list[tuple[str, str]] = []
    for line in lines:
        name, text = re.fullmatch(r"  (\S.*?|)  +(\S.*)", line).groups()  # type: ignore[union-attr]
        cells.append((name or cells[-1][0], text))
    return cells


def test_each_feature_has_the_kernel_that_is_selected_for_it():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    listed = dict(rows(kernel_report(), "Kernel of each feature"))
    assert list(listed) == [feature.name for feature in FEATURES]
    for feature in FEATURES:
        try:
            assert listed[feature.name] == select_kernel(feature.call(device)).name
        except KernelError:
            assert listed[feature.name].startswith("none")


def test_on_a_cpu_it_says_why_no_cuda_kernel_is_used():
    listed = rows(kernel_report(torch.device("cpu")), "Kernels, the preferred first")
    assert list(dict.fromkeys(name for name, _ in listed)) == list(KERNELS)
    for name in ("flash_attn_3", "flash_attn_4", "flash_attn_2", "cuda_varlen"):
        assert [text for kernel, text in listed if kernel == name] == ["needs tensors on cuda, these are on cpu"]
    assert ("cpu_flash", "used, see above") in listed
    assert ("cpu_flash", "has no soft-capping (soft-capping)") in listed


def test_reasons_that_hold_for_some_features_name_them(monkeypatch):
    """A kernel that takes two dtypes and no ALiBi, ahead of the CPU's."""

    def unsupported(call: AttentionCall) -> str | None:
        if call.q.dtype not in (torch.bfloat16, torch.float16):
            return f"needs half precision, not {call.q.dtype}"
        return None if call.slopes is None else "no ALiBi"

    monkeypatch.setattr(KERNELS["flash_attn_3"], "unsupported", unsupported)
    report = kernel_report(torch.device("cpu"))
    listed = rows(report, "Kernels, the preferred first")
    assert ("flash_attn_3", "needs half precision, not torch.float64 (packed documents in float64)") in listed
    assert ("flash_attn_3", "no ALiBi (ALiBi, head dimension 256 with ALiBi)") in listed
    assert dict(rows(report, "Kernel of each feature"))["packed documents in bfloat16"] == "flash_attn_3"
    assert any(
        name == "cpu_flash" and text.startswith("could, but flash_attn_3 comes first (") for name, text in listed
    )


def test_versions_and_device_are_shown():
    shown = dict(rows(kernel_report(torch.device("cpu")), "This machine"))
    assert torch.__version__.split("+")[0] == shown["torch"].split("+")[0]
    assert shown["flash-attn"] == (flash_attn_packages.installed_version("flash-attn") or "not installed")
    assert shown["device"] == f"cpu, {torch.get_num_threads()} threads"


def test_the_command_line_prints_it(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["kernels"]) == 0
    assert capsys.readouterr().out == kernel_report() + "\n"


def test_a_hopper_without_flash_attention_3_is_told_of_it():
    sentence = faster_kernel((9, 0), "cuda_varlen")
    assert sentence is not None
    assert "flash-attention 3 (built from the folder hopper/" in sentence
    assert faster_kernel((9, 0), "flash_attn_3") is None
    assert faster_kernel((8, 0), "flash_attn_2") is None
    assert faster_kernel(None, "cpu_flash") is None
