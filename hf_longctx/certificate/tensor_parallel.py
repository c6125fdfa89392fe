"""Transformers' tensor parallelism, tried before a model is trained with it: a plan that leaves out a gradient, or a layer that
mixes features which lie on several ranks, is noticed by nobody else. Seen in 5.23: of 101 model types with a plan that
runs, Apertus (gradients of its activation's parameters), Gemma 3n and HRM (forward too).

    tiny copy, whole                        loss and gradients of a document, float32
    the same weights, tp_size=2             the same, over two processes

The processes are their own, on the CPU: a mesh of transformers takes a whole world, other precisions round by more than what is
looked for, and ranks that fail apart would leave a run waiting. Of tp_size=3 and more the same plan is tried: the copy has few
heads. The two meet at a file; nothing is listened at. Verdicts are kept beside certificates. Sent: rank 0's (sharing.py).
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_longctx.certificate import kept_certificates as cache
from hf_longctx.certificate.certificate import quiet_and_alone
from hf_longctx.certificate.exactness import Answer, difference
from hf_longctx.certificate.sharing import made_on_rank_0
from hf_longctx.certificate.tiny_config import tiny_configuration
from hf_longctx.certificate.tiny_model import tiny_model
from hf_longctx.certificate.tokens import ordinary_tokens

TOKENS = 24
TRIED = 2
"""Processes that share the copy."""
TOLERANCE = 1e-4
"""Largest difference, as a part of the largest gradient and of the loss. Rounding in float32 made 2e-6 in 98 types."""
LONGEST_SECONDS = 300.0
"""The two take seconds, most of them to import torch."""
NOT_TAKEN = ("ACCELERATE_", "TORCHELASTIC_", "PET_", "FSDP_")
"""Begin variables of a run that its two processes are no part of."""
WORKER = "import sys; from hf_longctx.certificate.tensor_parallel import compare; compare(*sys.argv[1:])"
MODEL, STORE, COMPARED = "model", "store", "compared.json"

logger = logging.get_logger(__name__)
_seen: dict[str, "Trial"] = {}
"""Key of a class and configuration -> what this process knows of it."""


@dataclass(frozen=True)
class Trial:
    """What is known of a model's tensor parallelism."""

    differs: str = ""
    """What, and by how much; empty where it computes as one process does."""
    unknown: str = ""
    """Why it could not be tried."""


def refuse_wrong_tensor_parallelism(model: Any, degree: int) -> None:
    """Refuse a model that was loaded with tp_size=`degree` if a tiny copy gives another loss, or other gradients, over two
    processes than in one. Where no copy can be tried, rank 0 says that nothing is known. Each rank of the default process group
    calls this.

    Raises:
        ValueError: it does; with what differs. Or this rank has another model or other code than rank 0.
        RuntimeError, TimeoutError: rank 0 has no verdict; see sharing.py.
    """
    cls = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    trial = made_on_rank_0(cache.facts_of(cls, model.config), lambda: _known(cls, model.config), Trial)
    if trial.unknown and dist.get_rank() == 0:
        logger.warning(
            f"whether tensor parallelism computes this model as one process does is not known: {trial.unknown}"
        )
    if trial.differs:
        raise ValueError(
            f"tp_size={degree}: transformers' tensor parallelism does not compute {cls.__name__} as one process does: in a tiny "
            f"copy over {TRIED} ranks, {trial.differs}. Valid: no tp_size; documents are spread over ranks, and sharding='zero3' "
            "spreads weights"
        )


def _known(cls: type, config: Any) -> Trial:
    key = cache.key_of(cls, config, f"tensor parallelism of {TRIED}")
    if key not in _seen:
        trial = cache.read(key, Trial)
        if trial is None:
            trial = _tried(cls, config)
            if not trial.unknown:
                cache.write(key, trial)
        _seen[key] = trial
    return _seen[key]


def _tried(cls: type, config: Any) -> Trial:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet_and_alone(), tempfile.TemporaryDirectory() as folder:
            config = copy.deepcopy(config)
            config.distributed_config = None
            tiny_model(tiny_configuration(config, cls), torch.float32, cls=cls).save_pretrained(Path(folder) / MODEL)
            difference_found, where = _over_two(cls, Path(folder))
    except Exception as error:  # of modeling code, of transformers, or of a full disk
        return Trial(unknown=f"{type(error).__name__}: {str(error)[:300]}")
    finally:
        if shown:
            logging.enable_progress_bar()
    differs = difference_found > TOLERANCE
    return Trial(f"{where} differs by {difference_found:.1e} of the largest" if differs else "")


def _over_two(cls: type, folder: Path) -> tuple[float, str]:
    """Return the largest difference that two processes find, and where it is.

    Raises:
        RuntimeError: one of them failed; with its last line.
        TimeoutError: they have not ended.
    """
    processes, deadline = [], time.monotonic() + LONGEST_SECONDS
    try:
        for rank in range(TRIED):
            with (folder / f"{rank}.log").open("wb") as log:
                command = [sys.executable, "-c", WORKER, cls.__module__, cls.__qualname__, str(folder)]
                processes.append(subprocess.Popen(command, env=_environment(rank), stdout=log, stderr=log))
        while any(process.poll() is None for process in processes) and not any(map(subprocess.Popen.poll, processes)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{TRIED} processes have not ended within {LONGEST_SECONDS:g} s")
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        lines = (folder / f"{failed[0]}.log").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"process {failed[0]} ended, and said nothing")
    difference_found, where = json.loads((folder / COMPARED).read_text())
    return difference_found, where


def _environment(rank: int) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_TAKEN)}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(TRIED),
        "LOCAL_WORLD_SIZE": str(TRIED),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def compare(module: str, name: str, folder: str) -> None:
    """Run the copy in a folder over the two processes, this being one of them, and whole; the first writes how they differ."""
    cls: Any = import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    rank, path = int(os.environ["RANK"]), Path(folder).absolute()
    logging.disable_progress_bar()
    with quiet_and_alone():
        right = _answer(cls, path / MODEL)
        dist.init_process_group("gloo", init_method=(path / STORE).as_uri(), rank=rank, world_size=TRIED)
        answer = _answer(cls, path / MODEL, distributed_config=DistributedConfig(tp_size=TRIED))
    if rank == 0:
        (path / COMPARED).write_text(json.dumps(difference(answer, right)))
    dist.destroy_process_group()


def _answer(cls: Any, model_folder: Path, **loading: Any) -> Answer:
    """Load a saved copy, and return its answer for a document."""
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = cls.from_pretrained(model_folder, **settings, **loading).train()
    ids = ordinary_tokens(model.config, TOKENS)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.to(torch.float64)
    return Answer(float(loss.detach()), gradients)
