"""Compiles hooks.cpp for the torch at hand and loads it. torch is not imported here: its folder is found without."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("hooks.cpp")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_longctx" / "fake_cuda"


class HooksDoNotBuild(RuntimeError):
    """The compiler refuses hooks.cpp, or there is none: says which torch, and what the compiler wrote."""


def library() -> Path:
    """Return the compiled hooks, made once for each torch, Python and source.

    Raises:
        HooksDoNotBuild: they cannot be compiled.
    """
    release = version("torch")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise HooksDoNotBuild(f"torch {release}: no C++ compiler; valid: g++ or clang++ on the PATH, or CXX")
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(f"{release} {sys.version} {torch} {compiler}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    built = CACHE / f"hooks-{key}.so"
    if not built.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = built.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        command = [
            compiler,
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-O1",
            str(SOURCE),
            "-o",
            str(draft),
            *includes,
            *libraries,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HooksDoNotBuild(f"torch {release}: {' '.join(command)}\n{done.stderr}")
        draft.replace(built)  # another process may be building it too
    return built


def load() -> None:
    """Load the hooks into this process, which has not imported torch.

    Raises:
        HooksDoNotBuild: they cannot be compiled.
        RuntimeError: torch is there already, and has looked for hooks.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported: it looks for the hooks of CUDA once, and has found none")
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL).register_guard()
