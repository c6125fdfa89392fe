"""`hf-longctx config`: is a file right, what does it come to, where is each value from; and the JSON schema for editors.

What is shown is YAML again: a configuration that says everything but secrets, with the line, the override, the environment
variable or the default of each value behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_longctx.commands.shared.overrides import Overrides
from hf_longctx.redaction import HIDDEN, redacted
from hf_longctx.settings.data import ANY_SPLIT

if TYPE_CHECKING:
    from hf_longctx.config import Resolved
    from hf_longctx.settings import Config

KeyPath = tuple[str, ...]

STEPS = ("logging_steps", "save_steps", "eval_steps")
WIDEST = 72
"""Column at which comments begin at the latest, where lines are not longer."""


def config(
    file: Annotated[Path | None, typer.Argument(help="YAML file.", show_default=False)] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of such files, for editors.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print tables of all keys, in Markdown.")] = False,
) -> None:
    """Check a configuration; show its values and where they are from.

    Example: hf-longctx config configs/tiny.yaml longctx.capacity=8192
    """
    from hf_longctx.commands.shared.reference import json_schema, tables
    from hf_longctx.config import resolve
    from hf_longctx.precision import AUTO

    if schema or reference:
        if file is not None:
            raise ValueError(f"{'--schema' if schema else '--reference'} is of all files: leave {file} out")
        print(json.dumps(json_schema(), indent=2) if schema else tables())
        return
    if file is None:
        raise ValueError("give a FILE to check, or --schema, or --reference")
    resolved = resolve(file, overrides or [])
    print(f"# {file}: valid. All values, and where they are from; of training, those that were given.")
    if resolved.config.training.get("bf16") == AUTO:
        print(f"# training.bf16: auto computes in {_precision_here(resolved.config)}")
    lines = list(shown(resolved))
    width = min(WIDEST, max(len(text) for text, _ in lines))
    for text, source in lines:
        print(f"{text:<{width}}  # {source}" if source else text)


def _precision_here(config: Config) -> str:
    """Say what `bf16: auto` comes to on this machine, and why."""
    import torch

    from hf_longctx.commands.shared.ranks import gpus
    from hf_longctx.precision import decide_here

    device = torch.device("cpu" if config.training.get("use_cpu") or not gpus() else "cuda")
    decision = decide_here(device).over(config.model.dtype)
    return f"{decision.computes} on this machine: {decision.reason}"


def shown(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(line of YAML, where its value is from), in order."""
    from hf_longctx.settings import SourceKeys
    from hf_longctx.settings.longctx import LongContextPlugin

    values = resolved.config.model_dump()
    plugin = LongContextPlugin(**resolved.config.longctx.given())
    values["longctx"] = {name: getattr(plugin, name) for name in values["longctx"]}
    # transformers keeps numbers of steps as float, for shares of a run: whole ones are numbers of steps, as they were given.
    steps = {
        name: int(value) for name, value in values["training"].items() if name in STEPS and value and value % 1 == 0
    }
    values["training"] |= steps
    if resolved.config.data.sources is not None:
        for name in [*SourceKeys.model_fields, "path"]:  # each source has its own
            del values["data"][name]
    yield from _walk(values, (), 0, resolved.origin)


def _walk(values: dict[str, Any], path: KeyPath, depth: int, origin: dict[KeyPath, str]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        here, margin = (*path, str(key)), "  " * depth
        if path[:1] == ("data",) and key == "path":  # files by split; a source without splits has files alone
            files = value.get(ANY_SPLIT, value) if isinstance(value, dict) else value
            yield f"{margin}{key}: {_as_yaml(files)}", _source(here, origin)
        elif isinstance(value, dict) and value:
            yield f"{margin}{key}:", ""
            yield from _walk(value, here, depth + 1, origin)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{margin}{key}:", ""
            for number, item in enumerate(value):
                dash = "- "
                for text, source in _walk(item, (*here, str(number)), depth + 2, origin):
                    yield f"{margin}  {dash}{text[2 * depth + 4 :]}", source
                    dash = "  "
        else:
            public, source = _without_secrets(value, str(key)), _source(here, origin)
            hides = public != value and source.startswith("override")
            yield f"{margin}{key}: {_as_yaml(public)}", f"{source.partition('=')[0]}={HIDDEN}'" if hides else source


def _without_secrets(value: Any, key: str) -> Any:
    """Return it as it may be pasted where others read it: what a report would hide is hidden here too."""
    if isinstance(value, list):
        return [_without_secrets(item, key) for item in value]
    return redacted(value, key) if isinstance(value, str) else value


def _source(path: KeyPath, origin: dict[KeyPath, str]) -> str:
    import os

    from hf_longctx.settings.training import RENAMED

    old = {new: old for old, new in RENAMED.items()}
    for name in (path, (*path[:-1], old.get(path[-1], path[-1]))):
        if name in origin:
            return origin[name]
    variable = f"HF_LONGCTX_{path[-1].upper()}"
    return f"environment {variable}" if path[0] == "longctx" and variable in os.environ else "default"


def _as_yaml(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
