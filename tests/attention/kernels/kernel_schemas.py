"""Signatures of the functions that attention kernels call, as releases of their packages have them: recorded in
kernel_schemas.json, and read from unpacked packages.

    python tests/attention/kernels/kernel_schemas.py NAME=FOLDER ... > tests/attention/kernels/kernel_schemas.json

    flash-attn-2.8.3=FOLDER      with flash_attn/flash_attn_interface.py (sdist, or the repository at that tag)
    flash_attn_3-3.0.0-2025=FOLDER   with hopper/flash_api.cpp or hopper/flash_api_stable.cpp (the repository)
    flash-attn-4-4.0.0=FOLDER    with flash_attn/cute/interface.py (wheel)
    torch-2.11=FOLDER            with torchgen/packaged/ATen/native/native_functions.yaml (wheel)

Nothing of a package is imported or run: Python is parsed, and schemas of operators are read as text.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).with_suffix(".json")
Parameter = tuple[str, str, bool, bool]
"""Name, type (empty: not written), whether it may be left out, whether it is given by name alone."""
PYTHON = {
    "flash_attn/flash_attn_interface.py": ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    "flash_attn/cute/interface.py": ("_flash_attn_fwd", "_flash_attn_bwd"),
}
OPERATORS = {
    "hopper/flash_api_stable.cpp": ("fwd", "bwd"),
    "hopper/flash_api.cpp": ("fwd", "bwd"),
    "torchgen/packaged/ATen/native/native_functions.yaml": (
        "_flash_attention_forward",
        "_flash_attention_backward",
        "_efficient_attention_forward",
        "_efficient_attention_backward",
    ),
}


def recorded() -> dict[str, dict[str, list[Parameter]]]:
    """Release -> function -> its parameters."""
    releases = json.loads(RECORDED.read_text())
    return {
        release: {name: [tuple(parameter) for parameter in parameters] for name, parameters in functions.items()}
        for release, functions in releases.items()
    }


def read(folder: Path) -> dict[str, list[Parameter]]:
    """Function -> its parameters, of an unpacked package. Raises ValueError where there is none of the files, or a function is
    missing."""
    for name, wanted in PYTHON.items():
        if (folder / name).is_file():
            return _complete(dict(_of_python((folder / name).read_text(), wanted)), wanted, folder / name)
    for name, wanted in OPERATORS.items():
        if (folder / name).is_file():
            return _complete(dict(_of_operators((folder / name).read_text(), wanted)), wanted, folder / name)
    raise ValueError(f"{folder} has none of {[*PYTHON, *OPERATORS]}")


def _complete(functions: dict[str, Any], wanted: tuple[str, ...], file: Path) -> dict[str, Any]:
    if missing := [name for name in wanted if name not in functions]:
        raise ValueError(f"{file} has no {missing}")
    return functions


def _of_python(text: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[Parameter]]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            positional, given = node.args.args, len(node.args.args) - len(node.args.defaults)
            types = [ast.unparse(argument.annotation) if argument.annotation else "" for argument in positional]
            parameters = [
                (argument.arg, kind, at >= given, False) for at, (argument, kind) in enumerate(zip(positional, types))
            ]
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
                kind = ast.unparse(argument.annotation) if argument.annotation else ""
                parameters.append((argument.arg, kind, default is not None, True))
            yield node.name, parameters


def _of_operators(text: str, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[Parameter]]]:
    joined = re.sub(r'"\s*\n\s*"', "", text)  # C++ writes a schema as strings end to end
    for name in wanted:
        schema = re.search(rf'(?:m\.def\("|- func: ){name}\((.*?)\) ->', joined)
        if schema is not None:
            yield name, _of_schema(schema[1])


def _of_schema(schema: str) -> list[Parameter]:
    parameters, by_name = [], False
    for part in re.split(r",\s*(?![^(]*\))", schema):
        declared, has_default, _ = part.strip().partition("=")
        if declared.strip() == "*":
            by_name = True
            continue
        kind, name = declared.strip().rsplit(" ", 1)
        parameters.append((name, re.sub(r"\(\w+!?\)", "", kind), bool(has_default), by_name))
    return parameters


def check(parameters: list[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for a call that a function with these parameters would refuse: a name or a number of arguments that it
    does not have, one that is missing, or a value of another type than is written."""
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds(
                name,
                kinds.KEYWORD_ONLY if by_name else kinds.POSITIONAL_OR_KEYWORD,
                default=None if optional else kinds.empty,
            )
            for name, _, optional, by_name in parameters
        ]
    )
    written = {name: kind for name, kind, *_ in parameters}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if not _fits(value, written[name]):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}, and {written[name]} is wanted")


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of a type as a schema or an annotation has it; SymInt is an int."""
    optional = kind.endswith("?") or "None" in kind or "Optional" in kind or not kind
    if value is None:
        return optional
    if isinstance(value, torch.Tensor):
        return "Tensor" in kind or not kind
    if isinstance(value, bool):
        return "bool" in kind or not kind
    if isinstance(value, int):
        return "int" in kind.lower() or not kind
    return not isinstance(value, float) or "float" in kind or not kind


def in_lines(releases: dict[str, dict[str, list[Parameter]]]) -> str:
    """JSON with a parameter in each line."""
    texts = []
    for release, functions in releases.items():
        lines = {name: ",\n   ".join(map(json.dumps, parameters)) for name, parameters in functions.items()}
        inside = ",\n".join(f"  {json.dumps(name)}: [\n   {text}\n  ]" for name, text in lines.items())
        texts.append(f" {json.dumps(release)}: {{\n{inside}\n }}")
    return "{\n" + ",\n".join(texts) + "\n}\n"


if __name__ == "__main__":
    named = dict(argument.split("=", 1) for argument in sys.argv[1:])
    print(in_lines({name: read(Path(folder)) for name, folder in named.items()}), end="")
