"""What can happen to the files of a checkpoint between two starts."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Damaged:
    """A checkpoint folder that was damaged, as it was after that."""

    folder: Path
    what: str
    identity: tuple[int, int] | None
    """None: the checkpoint stayed valid"""

    def spoils(self, folder: Path) -> bool:
        """Whether `folder` is this one, and not another that was written in its place since."""
        return folder == self.folder and _identity(folder) == self.identity

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.what}"


def damage(kind: str, output_dir: Path, rng: random.Random) -> list[Damaged]:
    """Damages the newest checkpoint, or sometimes the newest two. Without a checkpoint, nothing.

    Args:
        kind: one of DAMAGES.
    """
    newest = sorted(output_dir.glob("checkpoint-*"), key=lambda folder: int(folder.name.removeprefix("checkpoint-")))
    done = []
    for folder in newest[-rng.choice([1, 1, 1, 2]) :][::-1]:
        before = [checkpoint for checkpoint in newest if checkpoint != folder]
        what = DAMAGES[kind](folder, before[0] if before else None, rng)
        if what:
            done.append(Damaged(folder, what, _identity(folder) if kind != "half-written checkpoint" else None))
    return done


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_ino, status.st_mtime_ns


def _any_file(folder: Path, rng: random.Random) -> Path:
    """Choose a file of those that hold something."""
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))


def _truncated(folder: Path, other: Path | None, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(rng.choice([0, size - 1, rng.randrange(size)]))
    return f"{path.name} of {size} bytes is cut to {path.stat().st_size}"


def _flipped(folder: Path, other: Path | None, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    content = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {path.name} is flipped"


def _removed(folder: Path, other: Path | None, rng: random.Random) -> str:
    path = _any_file(folder, rng)
    path.unlink()
    return f"{path.name} is removed"


def _replaced(folder: Path, other: Path | None, rng: random.Random) -> str:
    """By the other checkpoint's; nothing without another one."""
    if other is None:
        return ""
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if (other / path.name).is_file() and (other / path.name).read_bytes() != path.read_bytes()
    ]
    name = rng.choice(names)
    shutil.copyfile(other / name, folder / name)
    return f"{name} is that of {other.name}"


def _without_manifest(folder: Path, other: Path | None, rng: random.Random) -> str:
    (folder / "manifest.json").write_bytes(b"")
    return "manifest.json is empty"


def _half_written(folder: Path, other: Path | None, rng: random.Random) -> str:
    """Leaves the beginning of a later checkpoint beside this one, which stays as it is."""
    step = int(folder.name.removeprefix("checkpoint-")) + 1
    unfinished = folder.with_name(f".writing-checkpoint-{step}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    left = rng.sample(files, rng.randrange(1, len(files) + 1))
    for path in left:
        content = path.read_bytes()
        (unfinished / path.name).write_bytes(content[: rng.randrange(len(content) + 1)])
    return f"{unfinished.name} has parts of {len(left)} files"


DAMAGES: dict[str, Callable[[Path, Path | None, random.Random], str]] = {
    "file truncated": _truncated,
    "bit flipped": _flipped,
    "file removed": _removed,
    "file of another checkpoint": _replaced,
    "empty manifest": _without_manifest,
    "half-written checkpoint": _half_written,
}
"""Kind -> what does it, given the checkpoint and an older one; in words, or nothing where it cannot be done."""
