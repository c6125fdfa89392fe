"""Writing checkpoints while training goes on.

A save has three parts. Training only starts it, and waits for the first part before it next changes a weight:

    training    save()   | forward, backward of the next step | copied()  optimizer step | forward ...
    background           copy this rank's share to host memory |  put weights together, write, fsync, hash | agree, rename

Nothing that is copied changes in forward and backward, so a copy that is quicker than a step costs nothing. Sent between ranks,
on a group of the checkpoints' own: parts of weights to the rank that writes them whole; what each rank wrote, to rank 0,
which writes the manifest and renames the folder; whether all went well, to all.

A save that fails on any rank (a full disk) is undone on all and reported; training goes on, and the next save tries again.
"""

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint.boxes import Box, Cut, cuts, views, whole_box
from hf_longctx.checkpoint.folder import CheckpointError, FileEntry, Manifest, Part, TensorEntry
from hf_longctx.checkpoint.pinned import PinnedSlabs
from hf_longctx.checkpoint.rank_messages import Ranks
from hf_longctx.checkpoint.whole_weights import Parts, whole_weights
from hf_longctx.checkpoint.written_shares import Shares, share_out

ADAPTER_WEIGHTS = "adapter_weights.safetensors"
"""The file of what is trained beside a model that stays as it is, under its names in the model; PEFT's own file has others."""
INDEX = "model.safetensors.index.json"
VISIBLE_SECONDS = 60.0
"""How long rank 0 waits to see what other machines have written: NFS clients remember for so long what was not there."""

logger = logging.get_logger(__name__)


@dataclass
class Contents:
    """Contents of one checkpoint, taken from a trainer at one step."""

    step: int
    serial: int
    """of checkpoints in one output directory: the one written later has the larger one"""
    sharding: str
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, tuple[str, torch.Tensor]] | None
    """`<kind>/<weight>` -> (weight, state); None: the model alone"""
    random: bytes
    texts: dict[str, str]
    """files that rank 0 writes"""
    export: Callable[[Path, dict[str, torch.Tensor]], None]
    """rank 0 calls it in the background with the folder and the weights it owns, for configuration and the like"""
    adapters: bool = False
    """the weights are not a whole model"""


@dataclass
class _Share:
    """The part of a checkpoint that this rank writes: on its device, and later in host memory."""

    weights: Parts = field(default_factory=dict)
    optimizer: Parts = field(default_factory=dict)


class CheckpointWriter:
    """Writes checkpoints of one training, one at a time. All ranks make it and call it together.

    Args:
        in_background: whether training goes on while a checkpoint is written.
    """

    def __init__(self, ranks: Ranks, in_background: bool = True) -> None:
        self.ranks = ranks
        self.in_background = in_background
        self.failure: str | None = None
        """why the last save failed; None: it did not"""
        self.failures = 0
        self.doing = ""
        """what the background thread does now; empty: nothing"""
        self._shares: Shares | None = None
        self._cuts: dict[str, list[Cut]] = {}
        self._hosts: dict[Any, torch.Tensor] = {}
        self._pinned = PinnedSlabs()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """to copy on, kept: torch hands out 32 in turn, and so in time those of NCCL and of offload"""
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._outcome: str | None = None
        self._broken: BaseException | None = None

    def save(self, contents: Contents, final: Path, then: Callable[[Path], None] = lambda final: None) -> None:
        """Begins to write a checkpoint, once the one before is done. `then` is called on rank 0 when it is there."""
        self.wait()
        if self._shares is None:
            self._cuts = {name: cuts(tensor) for name, tensor in contents.weights.items()}
            self._shares = share_out(contents.weights, self._cuts, self.ranks, contents.adapters)
        sources = self._sources(contents, self._shares)
        ready = _recorded(sources)
        self._copied = threading.Event()
        self._outcome = None
        self._thread = threading.Thread(
            target=self._run,
            args=(contents, self._shares, sources, ready, final, then),
            name=f"writing {final.name}",
            daemon=True,
        )
        self._thread.start()
        if not self.in_background:
            self.wait()

    def copied(self) -> None:
        """Returns when weights and optimizer may change."""
        if self._thread is not None:
            self._copied.wait()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when nothing is being written. What went wrong is in `failure`.

        Raises:
            CheckpointError: a rank died meanwhile.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, self.doing = None, ""
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise CheckpointError(f"no checkpoint could be written: {broken}") from broken
        self.failure = self._outcome
        self.failures += self.failure is not None

    def finish(self, seconds: float) -> None:
        """Give what is being written so much time, after an error of training."""
        if self._thread is not None:
            self._thread.join(seconds)

    # What this rank copies

    def _sources(self, contents: Contents, shares: Shares) -> _Share:
        share, me = _Share(), self.ranks.rank
        for name, tensor in contents.weights.items():
            mine = [cut for cut in self._cuts[name] if shares.copier[name][cut[0]] == me]
            if mine:
                share.weights[name] = dict(views(tensor, mine))
        for key, (name, tensor) in (contents.optimizer or {}).items():
            keepers = shares.keeper[name]
            if self._lies_as(key, tensor, contents.weights[name]):
                mine = [cut for cut in self._cuts[name] if keepers[cut[0]] == me]
            else:  # the same on all ranks
                mine = cuts(tensor) if min(keepers.values()) == me else []
            if mine:
                share.optimizer[key] = dict(views(tensor, mine))
        return share

    @staticmethod
    def _lies_as(key: str, state: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether a state is in parts as its weight is."""
        alike = isinstance(state, DTensor) == isinstance(weight, DTensor)
        if state.ndim and not alike:
            raise CheckpointError(
                f"the optimizer's {key} has shape {tuple(state.shape)} and belongs to one rank's part of a weight of shape "
                f"{tuple(weight.shape)}: it could not be read by other numbers of ranks. Valid: an optimizer whose state has "
                "the shape of the weights (AdamW, SGD, Lion ...), or sharding='ddp'"
            )
        return alike and state.shape == weight.shape

    # In the background

    def _run(
        self,
        contents: Contents,
        shares: Shares,
        sources: _Share,
        ready: dict[torch.device, Any],
        final: Path,
        then: Callable[[Path], None],
    ) -> None:
        copies = _Share()
        try:
            self.doing = "copying to host memory"
            problem = _problem(lambda: self._copy(sources, copies, ready))
            self._copied.set()
            self._outcome = self._write(contents, shares, copies, final, then, problem)
        except BaseException as error:
            self._broken = error
        finally:
            self._copied.set()

    def _copy(self, sources: _Share, copies: _Share, ready: dict[torch.device, Any]) -> None:
        """Copies to host memory; on CUDA beside the device's other work. A thread begins on the first device, whichever is
        the rank's, and a stream that ends would go back to that one, and leave half a GiB of this process there."""
        for device in ready:
            torch.cuda.set_device(device)
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
        streams = self._streams
        for device, event in ready.items():
            streams[device].wait_event(event)
        pairs = (("weight", sources.weights, copies.weights), ("optimizer", sources.optimizer, copies.optimizer))
        for kind, parts, into in pairs:
            for name, boxes in parts.items():
                into[name] = {}
                for box, source in boxes.items():
                    stream = streams.get(source.device)
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        into[name][box] = host = self._host((kind, name, box), source)
                        host.copy_(source, non_blocking=stream is not None)
        for stream in streams.values():
            stream.synchronize()

    def _host(self, key: Any, source: torch.Tensor) -> torch.Tensor:
        """A place in host memory, kept from save to save."""
        host = self._hosts.get(key)
        if host is None or host.dtype != source.dtype or host.shape != source.shape:
            host = self._pinned.like(source) if source.is_cuda else torch.empty(source.shape, dtype=source.dtype)
            self._hosts[key] = host
        return host

    def _write(
        self,
        contents: Contents,
        shares: Shares,
        copies: _Share,
        final: Path,
        then: Callable[[Path], None],
        problem: str | None,
    ) -> str | None:
        """Returns what went wrong, the same on all ranks; `problem`: what has on this one already. Raises where ranks cannot talk
        to each other any more."""
        ranks, writing = self.ranks, final.with_name(folders.WRITING + final.name)
        self.doing = f"making {writing.name}"
        if ranks.rank == 0:
            problem = problem or _problem(lambda: folders.begin(final))
        problem = _first_problem(ranks.gathered(problem))
        if problem is None:
            self.doing = "putting weights together"
            whole = whole_weights(contents.weights, shares, copies.weights, self.ranks)
            written: tuple[dict, dict, dict] = {}, {}, {}
            problem = _problem(lambda: self._write_files(writing, contents, shares, copies, whole, written))
            self.doing = "waiting for the other ranks' files"
            reports = ranks.collected((problem, *written))
            problem = None
            if reports is not None:
                problem = _first_problem([report[0] for report in reports])
                problem = problem or _problem(lambda: self._complete(writing, final, contents, reports))
                if problem is None and (left := _problem(lambda: then(final))):
                    logger.warning(f"{final} is written. {left}")
            problem = ranks.agreed(problem)
        if problem is not None:
            shutil.rmtree(writing, ignore_errors=True)
            ranks.gathered(None)  # nobody begins the next one before all have cleared away this one
        return problem

    def _write_files(
        self,
        writing: Path,
        contents: Contents,
        shares: Shares,
        copies: _Share,
        whole: dict[str, torch.Tensor],
        written: tuple[dict, dict, dict],
    ) -> None:
        """Fills `written`: this rank's files, and where weights and optimizer lie in them."""
        files, weights, optimizer = written
        writing.mkdir(parents=True, exist_ok=True)  # another machine may not have heard of it yet
        if whole:
            name = ADAPTER_WEIGHTS if contents.adapters else shares.files[self.ranks.rank]
            self._write_tensors(writing / name, whole, files)
            weights |= {key: _entry(tensor, [(name, key, whole_box(tensor))]) for key, tensor in whole.items()}
        if contents.optimizer is not None:
            name = folders.state_file(self.ranks.rank, self.ranks.world_size)
            tensors = {folders.RANDOM: torch.frombuffer(bytearray(contents.random), dtype=torch.uint8)}
            for key, parts in copies.optimizer.items():
                keys = [key if len(parts) == 1 else f"{key}#{number}" for number in range(len(parts))]
                tensors |= dict(zip(keys, parts.values()))
                places = [(name, part_key, box) for part_key, box in zip(keys, parts)]
                optimizer[key] = _entry(contents.optimizer[key][1], places)
            self._write_tensors(writing / name, tensors, files)
        if self.ranks.rank == 0:
            self.doing = "writing configuration"
            for name, text in contents.texts.items():
                (writing / name).write_text(text, encoding="utf-8")
            contents.export(writing, whole)

    def _write_tensors(self, path: Path, tensors: dict[str, torch.Tensor], files: dict[str, FileEntry]) -> None:
        self.doing = f"writing {path.name}"
        save_file(tensors, path, metadata={"format": "pt"})
        folders.sync(path)
        files[path.name] = folders.file_entry(path)

    def _complete(self, writing: Path, final: Path, contents: Contents, reports: list[Any]) -> None:
        """Write the index of the weights and the manifest, then give the folder its name: on rank 0, when every rank has
        written."""
        self.doing = f"completing {final.name}"
        files: dict[str, FileEntry] = {}
        weights: dict[str, TensorEntry] = {}
        optimizer: dict[str, TensorEntry] = {}
        parts: dict[str, list[Part]] = {}
        for _, of_rank, weights_of_rank, optimizer_of_rank in reports:
            files |= of_rank
            weights |= weights_of_rank
            for key, entry in optimizer_of_rank.items():
                optimizer[key] = entry
                parts.setdefault(key, []).extend(entry.parts)
        optimizer = {key: entry.model_copy(update={"parts": tuple(parts[key])}) for key, entry in optimizer.items()}
        folders.wait_for_files(writing, files, VISIBLE_SECONDS)
        folders.share(writing)
        if len({entry.parts[0].file for entry in weights.values()}) > 1:
            index = {
                "metadata": {
                    "total_size": sum(tensor.numel() * tensor.element_size() for tensor in contents.weights.values())
                },
                "weight_map": {name: entry.parts[0].file for name, entry in sorted(weights.items())},
            }
            (writing / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        for path in sorted(set(writing.rglob("*")) - {writing / name for name in files}):
            folders.sync(path)
            if path.parent == writing and path.is_file() and not path.name.startswith("."):
                files[path.name] = folders.file_entry(path)
        manifest = Manifest(
            step=contents.step,
            serial=contents.serial,
            world_size=self.ranks.world_size,
            sharding=contents.sharding,
            files=files,
            weights=weights,
            optimizer=None if contents.optimizer is None else optimizer,
        )
        (writing / folders.MANIFEST).write_text(manifest.text(), encoding="utf-8")
        folders.sync(writing / folders.MANIFEST)
        folders.commit(writing, final)


def _entry(tensor: torch.Tensor, places: list[tuple[str, str, Box]]) -> TensorEntry:
    parts = tuple(Part(file=file, key=key, offset=box.offset, shape=box.shape) for file, key, box in places)
    return TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), parts=parts)


def _problem(action: Callable[[], Any]) -> str | None:
    """Runs it; what went wrong, in words."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first_problem(problems: list[str | None]) -> str | None:
    """Return the first of [rank], and whose it is."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None)


def _recorded(sources: _Share) -> dict[torch.device, Any]:
    """CUDA device -> the moment up to which its work belongs to what is copied."""
    tensors = [part for parts in (*sources.weights.values(), *sources.optimizer.values()) for part in parts.values()]
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}
