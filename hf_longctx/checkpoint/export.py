"""Files of a saved model beside its weights: configurations, and TrainingArguments without secrets."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.utils import CONFIG_NAME

from hf_longctx.checkpoint.folder import share
from hf_longctx.models.stages import cut_of
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.redaction import redacted

TRAINING_ARGUMENTS = "training_args"
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file beside adapters."""
NOT_COMPUTED = {
    "transformers_version",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "use_cache",
    "inference_mode",
    "peft_version",
}
"""Fields of a configuration that say nothing of what a model computes in training."""


def public_arguments(args: Any) -> str:
    """Return TrainingArguments as JSON without secrets, for whoever reads the model: it may be pushed. Nothing reads it again."""
    return json.dumps(redacted(args.to_dict()), indent=2) + "\n"


@contextmanager
def whole_state_dict(state: Any) -> Iterator[None]:
    """Let FSDP gather the whole model while Trainer saves it, also where checkpoints are in parts. With accelerate's default of
    SHARDED_STATE_DICT, Trainer would save nothing.

    Args:
        state: accelerate's.
    """
    fsdp = getattr(state, "fsdp_plugin", None)
    kind = getattr(fsdp, "state_dict_type", None)
    if fsdp is None or "FULL_STATE_DICT" in str(kind):
        yield
        return
    fsdp.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        fsdp.set_state_dict_type(kind)


@contextmanager
def named_as_made(model: Any) -> Iterator[None]:
    """Give what FSDP2 has in parts the names of the classes that it was made of. transformers finds by them how weights are
    called in files; a model that was made of a configuration, and not loaded, would be saved with names that nothing finds."""
    names = {}
    for cls in {type(part) for part in model.modules() if isinstance(part, FSDPModule)}:
        names[cls] = cls.__name__, cls.__module__
        made_of = next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))
        cls.__name__, cls.__module__ = made_of.__name__, made_of.__module__
    try:
        yield
    finally:
        for cls, (name, module) in names.items():
            cls.__name__, cls.__module__ = name, module


@contextmanager
def saved_as_peft(trainer: Any) -> Iterator[None]:
    """Let Trainer save the whole of a model with adapters of which this process holds only some stages."""
    trained, trainer.model = trainer.model, as_peft_saves(trainer.model)
    try:
        yield
    finally:
        trainer.model = trained


def named_once(model: Any, weights: dict[str, Any] | None) -> dict[str, Any] | None:
    """Leave out second names of tied weights, as transformers does with those that share storage; FSDP2 gathers each name by
    itself."""
    if weights is None:
        return None
    first_name = getattr(language_model_of(model), "all_tied_weights_keys", None) or {}
    second = {name for name, first in first_name.items() if name in weights and first in weights and name != first}
    # One that was untied since it was loaded has values of its own.
    tied = {name for name in second if torch.equal(weights[name], weights[first_name[name]])}
    return {name: weight for name, weight in weights.items() if name not in tied}


def publish_arguments(trainer: Any, folder: str | None) -> None:
    """Replace the pickle of arguments that Trainer writes beside a model, which holds the hub's token, with JSON, and let others
    read the weights."""
    if trainer.args.should_save:
        home = Path(folder if folder is not None else trainer.args.output_dir)
        (home / f"{TRAINING_ARGUMENTS}.bin").unlink(missing_ok=True)
        (home / f"{TRAINING_ARGUMENTS}.json").write_text(public_arguments(trainer.args))
        share(home)


def as_peft_saves(model: Any) -> Any:
    """Return where this process has some stages of a model with adapters, the whole of it, without memory."""
    cut = cut_of(model)
    return model if cut is None or cut.adapted is None else cut.adapted


def saved_dtype(model: Any) -> str:
    """Name the dtype that a configuration says of a model's weights, for as long as no step runs: while one does, FSDP2 has in
    their place what it has gathered, in the dtype that computes."""
    bare = language_model_of(model)
    return str(bare.dtype).removeprefix("torch.")


def save_configuration(model: Any, folder: Path, dtype: str) -> None:
    """Save what transformers needs beside weights to load a model, which were in `dtype` when they were saved."""
    config = copy.deepcopy(model.config)
    bare = language_model_of(model)
    config.architectures = [type(bare).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    if getattr(config, "distributed_config", None) is not None:
        config.distributed_config = None
    config.save_pretrained(folder)
    if bare.can_generate():
        bare.generation_config.save_pretrained(folder)


def changed_configuration(model: Any, folder: Path) -> list[str]:
    """Return in which fields a model computes otherwise than the one of the same weights that a folder's config.json is of, and
    its adapters otherwise than those of the folder's adapter_config.json, in words. Fields that only one of them has may be those
    of another version of transformers or PEFT."""
    changed = _changed(folder / CONFIG_NAME, partial(model.config.to_json_string, use_diff=False))
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        file = folder / ("" if name == "default" else name) / ADAPTER_CONFIG
        changed += _changed(file, partial(json.dumps, adapter.to_dict(), default=sorted))
    return changed


def _changed(file: Path, text: Callable[[], str]) -> list[str]:
    """Return which fields of a configuration that was saved are others now, in words; `text` gives it as JSON."""
    try:
        saved, now = json.loads(file.read_text()), json.loads(text())
        shared = sorted((saved.keys() & now.keys()) - NOT_COMPUTED)
    except (OSError, ValueError, TypeError, AttributeError):  # weights are compared by name and shape anyway
        return []
    changed = [name for name in shared if _plain(saved[name]) != _plain(now[name]) and not name.endswith("_token_id")]
    return [f"{name} {json.dumps(saved[name])} -> {json.dumps(now[name])}" for name in changed]


def _plain(value: Any) -> Any:
    """Return a list of names in one order: PEFT keeps sets."""
    return sorted(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value
