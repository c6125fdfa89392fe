"""A tiny configuration of the same class: every switch as it is, every size small.

    configuration -> dict, as written to config.json -> small sizes (tiny_sizes) -> layers of each kind (tiny_layers) ->
    configuration

and then a forward pass of 29 tokens. Where the class refuses a small size, or the forward fails, the fields that resist are
found by bisection and keep their values, up to full widths of MEMORY_LIMIT. `Shrunk.resisted` names them.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of
from hf_longctx.certificate.tiny_layers import Choice, Kinds, choices, keep_layers
from hf_longctx.certificate.tiny_model import MEMORY_LIMIT, causal_lm_class, empty_model, own_configuration, tiny_model
from hf_longctx.certificate.tiny_sizes import Path, changes
from hf_longctx.certificate.tokens import ordinary_tokens

TOKENS = 29
"""Length of the trial's document: that of a certificate's longest."""


MOST_SECONDS = 30.0
"""For finding the fields that resist. Those not tried by then keep their values, too."""


class CannotShrink(ValueError):
    """No tiny copy of a configuration could be built and run. The message names the fields that resisted."""


@dataclass(frozen=True)
class Shrunk:
    """A tiny configuration, and how it was made."""

    config: Any
    changed: dict[str, tuple[Any, Any]]
    """Field, such as "text_config.hidden_size" -> its value before and after."""
    resisted: tuple[str, ...]
    """Fields that kept their values because the model could not be built or run with smaller ones."""
    layers: tuple[int, ...]
    """Numbers of the layers that the copy's layers stand for."""


def tiny_configuration(config: Any, cls: type | None = None) -> Any:
    """Returns a configuration of the class of `config` with the same switches and small sizes. `config` stays as it is.

    `cls` is the model's class; without it, transformers' own causal language model. Raises CannotShrink.
    """
    return shrink(config, cls).config


def shrink(config: Any, cls: type | None = None) -> Shrunk:
    """Shrink as `tiny_configuration` does; say what was changed, too."""
    work = _Shrinking(config, cls)
    end = time.monotonic() + MOST_SECONDS
    paths = list(work.changes)
    failure = work.attempt(paths)
    if failure is None:
        return work.result()
    shrinkable: list[Path] = []
    with_own_widths: str | None = "not tried"
    for group in _groups(paths):  # one group of fields may be all that resists: far cheaper than full widths
        others = [path for path in paths if path not in group]
        if time.monotonic() >= end:
            continue
        with_own_widths = work.attempt(others)
        if with_own_widths is None:
            shrinkable, paths = others, group
            break
    else:
        alone = work.attempt([])
        if alone is not None:
            raise CannotShrink(
                f"no tiny copy of {type(config).__name__} runs as a plain model. With all sizes small: {failure}. With its "
                f"widths and heads: {with_own_widths}. With all of its sizes, in few layers: {alone}. Fields: "
                f"{', '.join(map(_dotted, work.changes))}"
            )
    resisted = _resisting(paths, shrinkable, lambda small: time.monotonic() < end and work.attempt(small) is None)
    work.attempt([path for path in work.changes if path not in resisted])
    return work.result(tuple(map(_dotted, resisted)))


def _resisting(paths: list[Path], shrunk: list[Path], works: Callable[[list[Path]], bool]) -> list[Path]:
    """Returns the fields among `paths` that cannot be small, by bisection. Those that can are added to `shrunk`."""
    if works([*shrunk, *paths]):
        shrunk.extend(paths)
        return []
    if len(paths) == 1:
        return paths
    half = len(paths) // 2
    return _resisting(paths[:half], shrunk, works) + _resisting(paths[half:], shrunk, works)


def _groups(paths: list[Path]) -> list[list[Path]]:
    """Fields of one meaning, which resist together; widths and heads, which belong together, last."""
    together: dict[Any, list[Path]] = {}
    attention = (
        Kind.HIDDEN,
        Kind.HEADS,
        Kind.KEY_VALUE_HEADS,
        Kind.HEAD_DIM,
        Kind.WIDTH,
        Kind.INTERMEDIATE,
        Kind.GROUPS,
        Kind.RANK,
        Kind.STATE,
    )
    for path in paths:
        kind = kind_of(path[-1])
        together.setdefault("widths" if kind in attention else str(kind), []).append(path)
    towers = [[path for path in paths if path[0] == name] for name in {path[0] for path in paths if len(path) > 1}]
    return sorted([*together.values(), *towers], key=len)


class _Shrinking:
    """Tries sets of small sizes on one configuration."""

    def __init__(self, config: Any, cls: type | None) -> None:
        self.cls = cls or causal_lm_class(config)
        self.original = config = own_configuration(self.cls, config)
        self.values = given_values(config)
        self.changes = changes(self.values)
        self.text = path_of_text(config)
        self.config: Any = None
        self.choice: Choice | None = None

    def attempt(self, paths: list[Path]) -> str | None:
        """Builds and runs a copy with the fields `paths` small. Returns None if that works, else why not."""
        try:
            values = _edited(self.values, {path: self.changes[path] for path in paths})
            self._few_layers_elsewhere(values)
            if self.choice is None:
                self.choice = self._choose_layers(values)
            config = self.rebuilt(self._with_layers(values, self.choice))
            run_once(config, self.cls)
        except Exception as error:  # whatever modeling code raises
            return f"{type(error).__name__}: {str(error).strip()[:300]}"
        self.config = config
        return None

    def result(self, resisted: tuple[str, ...] = ()) -> Shrunk:
        """Returns the copy of the last attempt that worked."""
        assert self.config is not None
        assert self.choice is not None
        before, after = _leaves(self.original.to_dict()), _leaves(self.config.to_dict())
        changed = {
            name: (before[name], value) for name, value in after.items() if name in before and before[name] != value
        }
        return Shrunk(self.config, changed, resisted, self.choice.kept)

    def rebuilt(self, values: dict[str, Any]) -> Any:
        """Returns a configuration of the original's class from edited values."""
        return type(self.original).from_dict(copy.deepcopy(values))

    def _few_layers_elsewhere(self, values: dict[str, Any]) -> None:
        """Two layers for each tower that is not the decoder, in place."""
        for path, scope in _scopes(values):
            counts = [value for name, value in scope.items() if kind_of(name) is Kind.LAYERS and is_size(value)]
            if path != self.text and counts and counts[0] > 2:
                scope.update(keep_layers(scope, counts[0], [0, 1]))

    def _with_layers(self, values: dict[str, Any], choice: Choice) -> dict[str, Any]:
        values = copy.deepcopy(values)
        scope = _at(values, self.text)
        scope.update(choice.fields(scope))
        return values

    def _choose_layers(self, values: dict[str, Any]) -> Choice:
        config = self.rebuilt(values)
        scope = _at(values, self.text)
        layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
        if not layers:  # several towers of two layers each, none of which is the decoder alone
            return Choice(0, ())
        kinds = Kinds.of(empty_model(config, self.cls), scope, layers)
        error: Exception | None = None
        for choice in choices(kinds):
            try:
                config = self.rebuilt(self._with_layers(values, choice))
                if kinds.are_kept(choice, empty_model(config, self.cls), _at(config.to_dict(), self.text)):
                    return choice
            except Exception as problem:  # a choice that the class refuses
                error = problem
        raise error or ValueError("even with all of its layers, a copy has other kinds of layers")


def run_once(config: Any, cls: type | None = None) -> None:
    """Builds a model of `config` and runs 29 tokens through it. Raises what goes wrong, FloatingPointError for logits not
    finite."""
    model = tiny_model(config, torch.float32, cls=cls).eval()
    input_ids = ordinary_tokens(config, TOKENS)[None]
    with torch.no_grad():
        logits = forward(model, input_ids=input_ids).logits
    if not logits.isfinite().all():
        raise FloatingPointError("logits are not finite")


def forward(model: Any, **arguments: Any) -> Any:
    """Calls a model without its cache; some have none to switch off."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    return model(**arguments)


# Configurations as dicts


def given_values(config: Any) -> dict[str, Any]:
    """Returns a configuration as written to config.json, less what its class computes from the rest: stale values of these would
    override what the class computes from small sizes."""
    values: dict[str, Any] = config.to_dict()
    values.pop("quantization_config", None)  # a copy has weights of its own
    given = copy.deepcopy(values)
    others = _take_non_arguments(config, given)
    try:
        computed = type(config).from_dict(copy.deepcopy(given)).to_dict()
    except Exception:  # a class that needs more than its arguments
        return values
    for path, value in others:
        if path[-1] == "per_layer_config" or _at(computed, path) != value:
            _at(given, path[:-1])[path[-1]] = value
    return given


def _take_non_arguments(config: Any, values: dict[str, Any], path: Path = ()) -> list[tuple[Path, Any]]:
    """Takes the values that are no arguments of the class, or of those of its parts, out of `values`; returns them."""
    arguments = {f.name for f in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    arguments |= set(inspect.signature(type(config).__init__).parameters) | {"model_type"}
    arguments |= set(config.attribute_map) | set(config.attribute_map.values())
    taken: list[tuple[Path, Any]] = []
    for name in list(values):
        part = vars(config).get(name)
        if isinstance(values[name], dict) and hasattr(part, "to_dict"):
            taken += _take_non_arguments(part, values[name], (*path, name))
        elif name not in arguments:
            taken.append(((*path, name), values.pop(name)))
    return taken


def path_of_text(config: Any) -> Path:
    """Returns where the configuration of the decoder is within `config`."""
    text = config.get_text_config(decoder=True)
    for name, value in vars(config).items():
        if value is text:
            return (name,)
        if hasattr(value, "to_dict") and any(inner is text for inner in vars(value).values()):
            return (name, *path_of_text(value))
    return ()


def _scopes(values: dict[str, Any], path: Path = ()) -> list[tuple[Path, dict[str, Any]]]:
    scopes = [(path, values)]
    for name, value in values.items():
        if isinstance(value, dict):
            scopes += _scopes(value, (*path, name))
    return scopes


def _at(values: dict[str, Any], path: Path) -> Any:
    """Returns the value at a path; None where there is none."""
    inner: Any = values
    for key in path:
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner


def _edited(values: dict[str, Any], new: dict[Path, Any]) -> dict[str, Any]:
    edited = copy.deepcopy(values)
    for path, value in new.items():
        _at(edited, path[:-1])[path[-1]] = value
    return edited


def _leaves(values: dict[str, Any], path: Path = ()) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        leaves |= _leaves(value, (*path, name)) if isinstance(value, dict) else {_dotted((*path, name)): value}
    return leaves


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


__all__ = ["MEMORY_LIMIT", "CannotShrink", "Shrunk", "shrink", "tiny_configuration"]
