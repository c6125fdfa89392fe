"""Models that transformers loads in parts (DistributedConfig), tried before they are trained: a plan that leaves out a gradient,
a layer that mixes features which lie on several ranks, or a weight that is put together wrongly is noticed by nobody else.

    tiny copy, whole                        loss and gradients of a document, float32
    the same weights in parts               the same, over two processes: once for each setting of MESHES that the run has

Seen in 5.23: of 101 model types whose plan of tensor parallelism runs, Apertus (gradients of its activation's parameters),
Gemma 3n and HRM (forward too); with fsdp_size, five of 183, Bailing's hybrid (convolutions that a file holds in three pieces) and
Kimi Linear among them.

The processes are their own, on the CPU: a mesh of transformers takes a whole world, other precisions round by more than what is
looked for, and ranks that fail apart would leave a run waiting. More parts than two are tried as two: the copy has few heads. The
two meet at a file; nothing is listened at. Verdicts are kept beside certificates. Sent: rank 0's (sharing.py).
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from hf_longctx.models.partial_gradients import sum_over_ranks
from hf_longctx.whole_files import written_whole

TRIED = 2
"""Processes that share the copy."""
MESHES: dict[str, dict[str, int]] = {
    "tp_size": {"tp_size": TRIED},
    "fsdp_size": {"fsdp_size": TRIED},
    "ep_size": {"fsdp_size": TRIED, "ep_size": TRIED},
}
"""Setting -> the DistributedConfig that it is tried with."""
TOKENS = 24
TOLERANCE = 1e-4
"""Largest difference, as a part of the largest gradient and of the loss. Rounding in float32 made 2e-6 in 98 types."""
LONGEST_SECONDS = 300.0
"""The two take seconds, most of them to import torch."""
NOT_TAKEN = ("ACCELERATE_", "TORCHELASTIC_", "PET_", "FSDP_")
"""Begin variables of a run that its two processes are no part of."""
WORKER = "import sys; from hf_longctx.certificate.loaded_in_parts import compare; compare(*sys.argv[1:])"
MODEL, STORE, VERDICTS = "model", "store", "verdicts.json"

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Trial:
    """Holds what is known of a model in parts, by setting; one that computes as one process does is in neither."""

    differs: dict[str, str] = field(default_factory=dict)
    """What, and by how much."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Why it could not be tried."""


_seen: dict[str, Trial] = {}
"""Key of a class, a configuration and settings -> what this process knows."""


def refuse_wrong_parts(model: Any, settings: Mapping[str, int]) -> None:
    """Refuse a model that was loaded in parts if a tiny copy that is loaded so gives another loss, or other gradients, over two
    processes than in one. Where no copy can be tried, rank 0 says that nothing is known. Each rank of the default process group
    calls this.

    Args:
        settings: those of MESHES that it was loaded with, and their values.

    Raises:
        ValueError: it does; with what differs. Or this rank has another model or other code than rank 0.
        RuntimeError, TimeoutError: rank 0 has no verdict; see sharing.py.
    """
    cls = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    names = sorted(settings)
    trial = made_on_rank_0(cache.facts_of(cls, config, names), lambda: _known(cls, config, names), Trial)
    if dist.get_rank() == 0:
        for name, reason in trial.unknown.items():
            logger.warning(
                f"{name}={settings[name]}: whether {cls.__name__} in parts computes as one process does is not known: {reason}"
            )
    for name, difference_found in trial.differs.items():
        raise ValueError(
            f"{name}={settings[name]}: {cls.__name__} as transformers loads it in parts does not compute as one process does: in "
            f"a tiny copy over {TRIED} ranks, {difference_found}. Valid: no {name}; documents are spread over ranks, and "
            "sharding='zero3' spreads weights"
        )


def _known(cls: type, config: Any, settings: list[str]) -> Trial:
    key = cache.key_of(cls, config, "in parts", settings)
    if key not in _seen:
        trial = cache.read(key, Trial)
        if trial is None:
            trial = _tried(cls, config, settings)
            if not trial.unknown:
                cache.write(key, trial)
        _seen[key] = trial
    return _seen[key]


def _tried(cls: type, config: Any, settings: list[str]) -> Trial:
    shown = logging.is_progress_bar_enabled()
    verdicts: dict[str, list[str]] = {}
    logging.disable_progress_bar()
    try:
        with quiet_and_alone(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_model(tiny_configuration(config, cls), torch.float32, cls=cls).save_pretrained(folder / MODEL)
            problem = _over_two(cls, folder, settings)
            if (folder / VERDICTS).exists():
                verdicts = json.loads((folder / VERDICTS).read_text())
    except Exception as error:  # of modeling code, of transformers, or of a full disk
        problem = _said(error)
    finally:
        if shown:
            logging.enable_progress_bar()
    both = {setting: verdicts.get(setting, ["", problem]) for setting in settings}
    differs, unknown = (
        {setting: verdict[place] for setting, verdict in both.items() if verdict[place]} for place in (0, 1)
    )
    return Trial(differs, unknown)


def _over_two(cls: type, folder: Path, settings: list[str]) -> str:
    """Have two processes run the saved copy whole and in parts; return what kept them from it, empty if nothing did."""
    processes, deadline = [], time.monotonic() + LONGEST_SECONDS
    try:
        for rank in range(TRIED):
            with (folder / f"{rank}.log").open("wb") as log:
                command = [sys.executable, "-c", WORKER, cls.__module__, cls.__qualname__, str(folder), *settings]
                processes.append(subprocess.Popen(command, env=_environment(rank), stdout=log, stderr=log))
        while any(process.poll() is None for process in processes) and not any(map(subprocess.Popen.poll, processes)):
            if time.monotonic() > deadline:
                return f"{TRIED} processes have not ended within {LONGEST_SECONDS:g} s"
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not failed:
        return ""
    lines = (folder / f"{failed[0]}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"process {failed[0]} ended, and said nothing"


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


def compare(module: str, name: str, folder: str, *settings: str) -> None:
    """Run the copy in a folder whole, and in parts over the two processes, this being one of them; the first writes a verdict
    (what differs, and why nothing is known) on each setting."""
    cls: Any = import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    rank, path = int(os.environ["RANK"]), Path(folder).absolute()
    logging.disable_progress_bar()
    verdicts: dict[str, tuple[str, str]] = {}
    with quiet_and_alone():
        right = _answer(cls, path / MODEL)
        dist.init_process_group("gloo", init_method=(path / STORE).as_uri(), rank=rank, world_size=TRIED)
        for setting in settings:
            try:
                answer = _answer(cls, path / MODEL, distributed_config=DistributedConfig(**MESHES[setting]))  # type: ignore[arg-type]
                error, where = difference(answer, right)
                verdicts[setting] = (
                    f"{where} differs by {error:.1e} of the largest" if error > TOLERANCE else "",
                    "",
                )
            except Exception as error:
                verdicts[setting] = ("", _said(error))
            if rank == 0:
                with written_whole(path / VERDICTS) as partial:
                    partial.write_text(json.dumps(verdicts))
    dist.destroy_process_group()


def _answer(cls: Any, model_folder: Path, **loading: Any) -> Answer:
    """Load a saved copy, and return its answer for a document."""
    settings = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = cls.from_pretrained(model_folder, **settings, **loading).train()
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        sum_over_ranks(module)  # as training does
    alike = TRIED if sharded else 1  # ranks that are summed over, all with this document
    ids = ordinary_tokens(model.config, TOKENS)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    loss.backward()
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.to(torch.float64) / alike
    return Answer(float(loss.detach()), gradients)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
