"""A small run that saves every step, and what tests do to it and to its folder."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint.folder import MANIFEST
from tests.builders.training_runs import Run, documents, train

LENGTHS = [30, 7, 21, 12, 40, 3, 18, 25, 9, 33]
SETTINGS: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
PLUGIN: dict[str, Any] = {"capacity": 40, "global_batch_documents": 4, "grace_seconds": 1e6}
"""The processes that these tests send SIGTERM live on."""
STEPS = 6


def run(output: Path, plugin: dict[str, Any] | None = None, resume: Any = None, **settings: Any) -> Run:
    callbacks = settings.pop("callbacks", ())
    given = SETTINGS | {"output_dir": output} | settings
    return train("llama", documents(LENGTHS), PLUGIN | (plugin or {}), given, resume=resume, callbacks=callbacks)


def resumed(folder: Path, saved: tuple[Path, list[Run]], **options: Any) -> Run:
    """Resumes in `folder` on one rank, and compares with the run that nothing had happened to."""
    continued = run(folder, {"capacity": 80}, resume=options.pop("resume", True), **options)
    expected = saved[1][0]
    assert continued.series("loss") == pytest.approx(expected.series("loss"), rel=1e-5)
    torch.testing.assert_close(continued.weights, expected.weights, rtol=0, atol=1e-5)
    return continued


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()


def rewritten(folder: Path, change: Any) -> None:
    """A manifest with another content and the checksum that belongs to it."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("checksum")
    change(content)
    (folder / MANIFEST).write_text(json.dumps({"checksum": folders._checksum(content), **content}))


class Limited(TrainerCallback):
    """Lets this process write no more than small files during some steps: a disk that is full for a while."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft = 20_000 if state.global_step in self.steps else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Terminates(TrainerCallback):
    """Sends this process SIGTERM in a step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
