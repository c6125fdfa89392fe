"""Checks of the place where a verb will write: before it works for an hour, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path


def refuse_unwritable(folder: Path, given: str) -> None:
    """Returns if files can be written into a folder, which need not be there yet. Nothing is left there.

    Args:
        folder: where files shall be.
        given: what said so, for the message: --output out.

    Raises:
        ValueError: they cannot; says which part of the path it is, and why.
    """
    nearest = folder.absolute()
    try:
        while not nearest.exists() and not nearest.is_symlink():
            nearest = nearest.parent
        if not nearest.exists():
            why = f"{nearest} is a link to {nearest.readlink()}, which is not there"
        elif nearest.is_dir():
            with tempfile.TemporaryFile(dir=nearest):
                return
        else:
            why = f"{nearest} is a file"
    except OSError as error:
        why = f"nothing can be written into {nearest}: {error.strerror or error}"
    raise ValueError(f"{given}: {why}. Give a folder in which you may write; it is made if it is not there")


def refuse_no_file(path: Path, given: str) -> None:
    """Return if a file can be written, as `refuse_unwritable` says of folders; its folder may have to be made."""
    if path.is_dir():
        raise ValueError(f"{given}: {path} is a folder; name a file")
    refuse_unwritable(path.parent, given)
