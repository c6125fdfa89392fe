"""A checkpoint's folder: whole or not there, and what is in it is what was written.

    output_dir/
      .writing-checkpoint-8/            being written, or what a crash left of it
      checkpoint-7/
        manifest.json                   size and sha256 of every file; where each part of each tensor lies; its own sha256
        model.safetensors, config.json  the model, as transformers loads it (or adapters, as PEFT does)
        state-00001-of-00002.safetensors  of each rank: parts of the optimizer's state, and its random numbers
        training_state.json             optimizer's settings, schedule, gradient scaler
        trainer_state.json              Trainer's, as ever

A folder gets its name when all of its files, their directory entries and the manifest are on disk: a rename, which the file
system does at once or not at all. Formats are JSON and safetensors: reading one runs nobody's code.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from transformers.trainer import TRAINER_STATE_NAME

from hf_longctx.whole_files import WRITING

MANIFEST = "manifest.json"
TRAINING_STATE = "training_state.json"
PREFIX = "checkpoint-"
RANDOM = "random"
"""Key of a rank's random state in its state file: uint8, JSON."""
REMOVING, REPLACED = ".removing-", ".replaced-"
HASHED_AT_ONCE = 2**24
"""Bytes: the interpreter is held between two such pieces, and training wants it too."""
LARGEST_MANIFEST = 2**30
"""Bytes. A part of a tensor takes about 200: 512 ranks with parts of 2,000 tensors, two of Adam each, come to 0.4 of it."""

FileName = Annotated[str, StringConstraints(pattern=r"^[^./\\\x00][^/\\\x00]{0,254}$")]
"""Inside the folder: no separator, no leading dot."""
Count = Annotated[int, Field(ge=0, strict=True)]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or could not be written; says which file, what was found and what is valid."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Entry):
    bytes: Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Part(_Entry):
    """A box of a tensor, and where it lies."""

    file: FileName
    key: str
    """its name in that file"""
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]


class TensorEntry(_Entry):
    dtype: str
    """as safetensors names it"""
    shape: tuple[Count, ...]
    parts: tuple[Part, ...]


class Manifest(_Entry):
    format: Literal["hf_longctx checkpoint 1"] = "hf_longctx checkpoint 1"
    step: Count
    serial: Count
    """larger than those of all checkpoints that were in the same directory when it was written"""
    world_size: Count
    sharding: str
    files: dict[FileName, FileEntry]
    weights: dict[str, TensorEntry]
    """name in the model; with adapters, only what is trained"""
    optimizer: dict[str, TensorEntry] | None
    """`<kind of state>/<name of the weight>`; None: the model alone was saved"""

    def text(self) -> str:
        """Return it as JSON, of which no byte may be missing at the end."""
        content = self.model_dump(mode="json")
        return json.dumps({"checksum": _checksum(content), **content}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises CheckpointError: none there, or not as it was written."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder that this machine sees")
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds no {MANIFEST}: it was not saved by LongContextTrainer, or not to its end. Files of other kinds "
                "(pytorch_model.bin, optimizer.pt, rng_state.pth) are pickles and are not read"
            )
        size = path.stat().st_size
        if size > LARGEST_MANIFEST:
            raise CheckpointError(f"{path} has {size} bytes, more than any manifest needs ({LARGEST_MANIFEST})")
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise CheckpointError(f"{path} is corrupt: it holds no JSON object")
            checksum = content.pop("checksum", None)
            if checksum != _checksum(content):
                raise CheckpointError(f"{path} is corrupt: its checksum is {checksum}, its content's is another")
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        except CheckpointError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CheckpointError(f"{path} is corrupt: {error}") from None


def _checksum(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file, as it is read now."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                for start in range(0, size, HASHED_AT_ONCE):
                    digest.update(view[start : start + HASHED_AT_ONCE])
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def problem_of(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, in words; None: nothing. Of `shares` readers, each looks at some of the files'
    content; 0: none does."""
    try:
        manifest = Manifest.read(folder)
        for number, (name, entry) in enumerate(sorted(manifest.files.items())):
            path = folder / name
            if not path.is_file():
                return f"{path} is missing"
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{path} has {size} bytes, and {entry.bytes} were written"
            if shares and number % shares == share and (digest := file_entry(path).sha256) != entry.sha256:
                return f"{path} is corrupt: its sha256 is {digest}, and {entry.sha256} was written"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def state_file(rank: int, world_size: int) -> str:
    """Name of a rank's file."""
    return f"state-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None: it is called otherwise."""
    match = re.fullmatch(re.escape(PREFIX) + r"(0|[1-9][0-9]*)", folder.name)
    return int(match[1]) if match else None


def serial_of(folder: Path) -> int | None:
    """The place of a checkpoint among others; None: it does not say."""
    try:
        return Manifest.read(folder).serial
    except (CheckpointError, OSError):
        return None


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders. First those that are damaged, then the one that was written last: a run that goes back to an earlier
    step leaves later ones behind, which are not its own. One in which a callback left a file before a crash is none."""
    if not output_dir.is_dir():
        return []
    entries = [
        (1 if (serial := serial_of(path)) is None else -serial, -step, path)
        for path in output_dir.iterdir()
        if (step := step_of(path)) is not None and _is_checkpoint(path)
    ]
    return [path for _, _, path in sorted(entries, key=lambda entry: (entry[0] != 1, entry))]


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, whole or not, of ours or of plain Trainer."""
    return any((path / name).exists() for name in (MANIFEST, TRAINER_STATE_NAME))


def begin(final: Path) -> Path:
    """Makes the folder in which a checkpoint is written.

    Raises:
        CheckpointError: something else has the checkpoint's name.
    """
    _refuse_file(final)
    writing = final.with_name(WRITING + final.name)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    return writing


def wait_for_files(writing: Path, files: Mapping[str, FileEntry], seconds: float) -> None:
    """Returns when all files that ranks have written are seen from here: network file systems may take a while.

    Raises:
        CheckpointError: one is not.
    """
    deadline = time.monotonic() + seconds
    for name, entry in files.items():
        path = writing / name
        while not path.is_file() or path.stat().st_size != entry.bytes:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{path} was written by another rank, and rank 0 does not see it after {seconds:g} s: all ranks must see the "
                    "same output_dir"
                )
            time.sleep(0.1)


def sync(path: Path) -> None:
    """Returns when a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(folder: Path) -> None:
    """Let those read the weights in a folder who may read the folder: safetensors 0.8 leaves each file to its owner alone."""
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # where a file system knows no modes
            path.chmod(folder.stat().st_mode & 0o666)


def commit(writing: Path, final: Path) -> None:
    """Gives a folder that is complete its name. What callbacks have left in a folder of that name meanwhile joins it; an
    older checkpoint of the same step is replaced, whichever trainer wrote it: who loads a folder may prefer files of that one.

    Raises:
        CheckpointError: something else has its name.
    """
    _refuse_file(final)  # which may have come meanwhile
    sync(writing)
    replaced = final.with_name(REPLACED + final.name)
    _remove(replaced)
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    sync(final.parent)
    if replaced.exists() and not _is_checkpoint(replaced):
        for path in replaced.iterdir():
            if not (final / path.name).exists():
                path.rename(final / path.name)
    _remove(replaced)


def _refuse_file(final: Path) -> None:
    if final.is_file():
        raise CheckpointError(f"{final} is a file, where a checkpoint was to be. Move it away")


def remove_leftovers(output_dir: Path) -> None:
    """Removes what crashes left: half-written, half-removed, files of whole_files.py too. A checkpoint that was just being
    replaced comes back."""
    for path in _hidden(output_dir, REPLACED):
        final = path.with_name(path.name.removeprefix(REPLACED))
        if not final.exists():
            path.rename(final)
    for prefix in (WRITING, REMOVING, REPLACED):
        for path in _hidden(output_dir, prefix):
            _remove(path)
    for path in list(output_dir.glob(f"{WRITING}*")):
        if path.is_file():
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a folder as far as that goes; of a link to one, the link alone."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _hidden(output_dir: Path, prefix: str) -> Iterator[Path]:
    yield from list(output_dir.glob(f"{prefix}{PREFIX}*"))


def rotate(written: Path, keep: int | None, protected: str | None) -> None:
    """Removes the checkpoints beyond `keep` (None or 0: keeps all): damaged ones, then those that were written first. Never the
    one just `written`, nor `protected`. Each loses its name first, so that none is ever seen in parts.

    Raises:
        CheckpointError: some could not be removed.
    """
    if not keep:
        return
    spared = {Path(kept).resolve() for kept in (written, protected) if kept}
    kept_here = [path for path in spared if path.parent == written.parent.resolve()]
    others = [path for path in checkpoints(written.parent) if path.resolve() not in spared]
    others.sort(key=lambda path: serial_of(path) or -1, reverse=True)
    stuck = []
    for path in others[max(0, keep - len(kept_here)) :]:
        removing = path.with_name(REMOVING + path.name)
        try:
            path.rename(removing)
        except OSError as error:
            stuck.append(str(error))
        _remove(removing)
    if stuck:
        raise CheckpointError(f"save_total_limit={keep}: {len(stuck)} checkpoints cannot be removed ({stuck[0]})")
