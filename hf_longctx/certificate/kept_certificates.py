"""Certificates on disk, each in a JSON file named after everything that it depends on, so that none is ever stale.

    key     class and configuration, the Python files beside the class and its bases, every file of hf_longctx, versions of
            torch and transformers, and functions and classes of other packages in the modules of these
    file    CACHE/certificates/KEY.json, which appears whole or not at all; one that cannot be read counts as missing

What names a configuration but changes no result (its path, the weights' dtype) is left out. Nothing is sent.
"""

import functools
import hashlib
import importlib.metadata
import json
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.whole_files import written_whole

Result = TypeVar("Result")
version = functools.cache(importlib.metadata.version)

NAMES_ONLY = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a configuration that a tiny copy does not have, or that change none of its results."""
FOLDER = "certificates"
PACKAGE = Path(__file__).parent.parent
VERSIONED = frozenset({"builtins", "numpy", "torch", *sys.stdlib_module_names})
"""Packages whose version is in the key, or that no model's results depend on."""
OUR_MODULES = tuple(f"hf_longctx.{part}." for part in ("attention", "certificate", "models"))
"""Parts of this package that certificates depend on; another package may have replaced code in them."""
COMPILED = "__compiled_fn_"
"""Begins the names that torch.compile adds to a module's globals, with an identifier that no other process has; they replace
nothing. Ranks would have different keys, and wait for each other's certificates in vain."""
NO_FILE = "no file"
"""Stands for the code of a module without a file, as of a notebook."""
THIS_PROCESS = uuid.uuid4().hex
"""A name that no other process has. It is in the key where code has no file: such a certificate is not found again."""


def key_of(cls: type, config: Any, *conditions: Any) -> str:
    """Return 32 hexadecimal digits that stand for a class with a configuration, all code, and `conditions` (of plain values)."""
    facts = facts_of(cls, config, *conditions)
    if NO_FILE in facts.values():
        facts["class"] += f" {THIS_PROCESS} {id(cls)}"
    return _digest(json.dumps(facts, sort_keys=True).encode())


def facts_of(cls: type, config: Any, *conditions: Any) -> dict[str, str]:
    """Return everything that a certificate depends on, as text by name: alike in all processes that would make the same one."""
    facts = {"class": f"{cls.__module__}.{cls.__qualname__}"}
    facts |= {f"config.{name}": _text(value) for name, value in _without_names(config.to_dict()).items()}
    facts |= {f"condition {number}": _text(value) for number, value in enumerate(conditions)}
    facts |= {f"version of {package}": version(package) for package in ("torch", "transformers")}
    facts["code of hf_longctx"] = _hash_of_files(PACKAGE, "**/*.py")
    modules = {base.__module__ for base in cls.__mro__ if _package(base.__module__) not in VERSIONED}
    facts |= {f"code beside {module}": _code_beside(module) for module in modules}
    return facts | dict(_replacements(cls))


def read(key: str, kind: type[Result]) -> Result | None:
    """Return what is kept under a key, an object of the dataclass `kind`; None if there is nothing, or nothing that can be
    read."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(_file(key).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError, RecursionError):
        return None


def write(key: str, result: Any) -> None:
    """Keep an object of a dataclass under a key. A folder that cannot be written is left as it is: nothing depends on it."""
    path = _file(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(dumped(result), encoding="utf-8")


def dumped(result: Any) -> str:
    """Return an object of a dataclass as JSON."""
    return json.dumps(asdict(result), default=str)


def _file(key: str) -> Path:
    return default_cache_dir() / FOLDER / f"{key}.json"


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_names(part) for name, part in value.items() if name not in NAMES_ONLY}
    return value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _code_beside(module: str) -> str:
    """Return a hash of the Python files in the folder of a module: a model's has its configuration too, and all that code from a
    hub imports. NO_FILE where the module has none (a notebook)."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return NO_FILE
    return _hash_of_files(Path(file).parent, "*.py")


@functools.cache
def _hash_of_files(folder: Path, pattern: str) -> str:
    """Return a hash of the files of a folder, as they are when a process first asks: what it has imported stays as it is."""
    return _digest(*(part for path in sorted(folder.glob(pattern)) for part in (path.name.encode(), path.read_bytes())))


def _replacements(cls: type) -> Iterator[tuple[str, str]]:
    """Yield (name, what it stands for) of the functions and classes of other packages in the modules of a class and of this
    package: they have none of the files above. What takes the place of modeling code (Liger's kernels, say) is among them."""
    ours = {name for name in sys.modules if name.startswith(OUR_MODULES)}
    for name in sorted({base.__module__ for base in cls.__mro__} | ours):
        if (module := sys.modules.get(name)) is not None and _package(name) not in VERSIONED:
            yield from sorted(_foreign(module))


def _foreign(module: ModuleType) -> Iterator[tuple[str, str]]:
    own = {_package(module.__name__), "transformers"} | VERSIONED
    holders: list[tuple[str, Mapping[str, Any]]] = [(module.__name__, vars(module))]
    holders += [
        (f"{module.__name__}.{name}", vars(value))
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for where, names in holders:
        for name, value in names.items():
            if name.startswith(COMPILED):
                continue
            if isinstance(value, FunctionType | type) and _package(value.__module__) not in own:
                yield f"{where}.{name}", f"{value.__module__}.{value.__qualname__}"


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
