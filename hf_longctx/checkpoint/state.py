"""The state of training besides weights, as tensors and JSON, and back: optimizer, schedule, scaler, random numbers.

torch numbers an optimizer's weights in the order of its groups; a checkpoint names them, so that it does not matter how a
run orders or splits them.
"""

import json
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from hf_longctx.checkpoint.folder import TRAINING_STATE, CheckpointError
from hf_longctx.checkpoint.reader import CheckpointReader, some

OF_GROUPS = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs"}
"""Parts of a schedule's state that may be lists, and then have one entry for each group."""
BY_STEP = "lr_lambdas"
"""Part of the state of schedules whose rates follow from the step."""
OF_SCHEDULES = {
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler_type",
    "lr_scheduler_kwargs": "lr_scheduler_kwargs",
}
"""Settings that a schedule's state takes the place of -> what the user calls them."""
PLAIN = (torch.Tensor, torch.nn.Parameter, DTensor)
"""Classes of tensors that checkpoints hold."""


def optimizer_tensors(
    optimizer: Any, names: Mapping[int, str]
) -> tuple[dict[str, tuple[str, torch.Tensor]], dict[str, Any]]:
    """The state of an optimizer: tensors, `<kind>/<weight>` -> (weight, tensor), and the rest as JSON.

    Args:
        names: id of a weight -> its name in the model.

    Raises:
        CheckpointError: it holds something that is neither.
    """
    state = optimizer.state_dict()
    order = _order(optimizer, names)
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    values: dict[str, Any] = {}
    for index, of_weight in state["state"].items():
        if not isinstance(index, int):
            raise CheckpointError(
                f"the optimizer keeps {index!r} beside the state of its weights, and checkpoints hold what belongs to a weight. "
                "Valid: an optimizer that keeps it in its groups' settings, save_only_model=True, or save_strategy='no'"
            )
        name = order[index]
        for kind, value in _unwrapped(of_weight).items():
            if _holds_tensors(value):
                raise CheckpointError(
                    f"the optimizer's {kind} is a {type(value).__name__} of tensors, and checkpoints hold each tensor under one "
                    "name. Valid: tensors beside each other in the state of a weight, save_only_model=True, or "
                    "save_strategy='no'"
                )
            if isinstance(value, torch.Tensor):
                if type(value) not in PLAIN:
                    raise CheckpointError(
                        f"the optimizer's {kind} is a {type(value).__name__}, which a checkpoint cannot hold. Valid: one whose "
                        "state is made of plain tensors, save_only_model=True, or save_strategy='no'"
                    )
                tensors[f"{kind}/{name}"] = name, value
            else:
                values[f"{kind}/{name}"] = as_json(value, f"the optimizer's {kind}")
    groups = []
    for group in state["param_groups"]:
        settings = {key: as_json(value, f"the optimizer's {key}") for key, value in group.items() if key != "params"}
        groups.append(settings | {"params": [order[index] for index in group["params"]]})
    in_tensors = {
        key: str(value.dtype).removeprefix("torch.")
        for group in state["param_groups"]
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    }
    kept = {
        "kind": _kind(optimizer),
        "tensors": sorted(tensors),
        "groups": groups,
        "values": values,
        "in_tensors": in_tensors,
    }
    return tensors, kept


def _unwrapped(of_weight: Mapping[str, Any]) -> dict[str, Any]:
    """Return a weight's state with tensors beside each other: bitsandbytes wraps those that it quantises in a dictionary with a
    name between underscores, against FSDP's gathering, and takes them back either way."""
    state: dict[str, Any] = {}
    for kind, value in of_weight.items():
        wraps = isinstance(value, Mapping) and kind.startswith("__") and kind.endswith("__")
        state |= value if wraps else {kind: value}
    return state


def _holds_tensors(value: Any) -> bool:
    """Whether a list or a dictionary has tensors in it, however deep."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, torch.Tensor) or _holds_tensors(item) for item in value
    )


def merged(
    kept: Sequence[Mapping[str, Any]], schedules: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `optimizer_tensors` gave as JSON in each stage of a pipeline, as one optimizer of the whole model would, and
    its schedule. Stages may have different numbers of groups, because Trainer splits them where weights lie on several meshes:
    groups with the same settings are one."""
    groups = [dict(group) for group in kept[0]["groups"]]
    schedule = {name: list(value) if _is_of_groups(name, value) else value for name, value in schedules[0].items()}
    known = {name for group in groups for name in group["params"]}
    for stage, of_stage in zip(kept[1:], schedules[1:]):
        for number, group in enumerate(stage["groups"]):
            new = [name for name in group["params"] if name not in known]  # tied embeddings are in two stages
            known.update(new)
            alike = next((other for other in groups if _settings(other) == _settings(group)), None)
            if alike is not None:
                alike["params"] = [*alike["params"], *new]
                continue
            groups.append(dict(group) | {"params": new})
            for name, entries in schedule.items():
                if _is_of_groups(name, entries):
                    entries.append(of_stage[name][number])
    tensors = sorted({key for stage in kept for key in stage["tensors"]})
    values = {key: value for stage in kept for key, value in stage["values"].items()}
    return dict(kept[0]) | {"tensors": tensors, "groups": groups, "values": values}, schedule


def _is_of_groups(name: str, value: Any) -> bool:
    return name in OF_GROUPS and isinstance(value, list)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _kind(optimizer: Any) -> str:
    """The optimizer's class by name; accelerate's wrapper has it inside."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def load_optimizer(
    optimizer: Any, saved: Mapping[str, Any], reader: CheckpointReader, weights: Mapping[str, torch.Tensor]
) -> list[int]:
    """Gives an optimizer a checkpoint's state and settings.

    Args:
        saved: what `optimizer_tensors` gave as JSON.
        weights: name -> weight, as this rank has it; without memory (meta) where another stage of a pipeline does.

    Returns:
        [group]: the group of the checkpoint that its weights were in.

    Raises:
        CheckpointError: it optimizes other weights, or puts into one group what had different settings. Groups may be split:
            accelerate does so where weights lie on different meshes.
    """
    if saved["kind"] != _kind(optimizer):
        raise CheckpointError(
            f"{reader.folder} was saved by {saved['kind']}, and this run has {_kind(optimizer)}, which cannot go on from its "
            "state. Set the optimizer as it was, or start a new run from the checkpoint's weights"
        )
    if saved["tensors"] != sorted(reader.manifest.optimizer or {}):
        raise CheckpointError(
            f"{reader.folder}: the manifest lists other tensors of the optimizer than {TRAINING_STATE}"
        )
    order = _order(optimizer, {id(weight): name for name, weight in weights.items()})
    settings = {name: group for group in saved["groups"] for name in group["params"]}
    number = {name: number for number, group in enumerate(saved["groups"]) for name in group["params"]}
    trained = {*order, *(name for name, weight in weights.items() if weight.is_meta and weight.requires_grad)}
    if settings.keys() != trained:
        missing, unknown = sorted(trained - settings.keys()), sorted(settings.keys() - trained)
        raise CheckpointError(
            f"{reader.folder} was saved by an optimizer of {len(settings)} weights, and this one has {len(trained)}: its state "
            f"lacks {some(missing)} and has {some(unknown)} besides. Train the same weights"
        )
    index = {name: number for number, name in enumerate(order)}
    groups: list[dict[str, Any]] = []
    origin: list[int] = []
    first = 0
    for group in optimizer.param_groups:
        names = order[first : first + len(group["params"])]
        first += len(names)
        of_group = [_settings(settings[name]) for name in names] or [_settings(group)]
        if any(other != of_group[0] for other in of_group):
            raise CheckpointError(
                f"{reader.folder}: the weights {some(names)} are one group of this optimizer and were in several, with other "
                "settings each (weight decay, learning rate). Group them as they were"
            )
        origin.append(number[names[0]] if names else 0)
        in_tensors = {
            key: torch.tensor(of_group[0][key], dtype=getattr(torch, dtype))
            for key, dtype in saved.get("in_tensors", {}).items()
            if key in of_group[0]
        }
        groups.append(of_group[0] | in_tensors | {"params": [index[name] for name in names]})
    state: dict[str, dict[str, Any]] = {}
    for key, entry in (reader.manifest.optimizer or {}).items():
        kind, _, name = key.partition("/")
        if name not in weights:
            raise CheckpointError(f"{reader.folder}: {key} belongs to no weight of the model")
        if weights[name].is_meta:
            continue
        state.setdefault(name, {})[kind] = reader.read_state(key, entry, weights[name])
    for key, value in saved["values"].items():
        kind, _, name = key.partition("/")
        state.setdefault(name, {})[kind] = value
    optimizer.load_state_dict(
        {"state": {index[name]: state[name] for name in order if name in state}, "param_groups": groups}
    )
    return origin


@contextmanager
def settings_kept(optimizer: Any, names: Collection[str]) -> Iterator[None]:
    """Keep these settings of an optimizer's groups, where they have them, while its state is loaded."""
    before = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    yield
    for group, kept in zip(optimizer.param_groups, before):
        group.update(kept)


def load_schedule(
    schedule: Any, saved: Mapping[str, Any], origin: Sequence[int], changed: Collection[str] = ()
) -> None:
    """Gives a learning rate schedule a checkpoint's state; `origin` as `load_optimizer` returns it.

    Rates that follow from the step are computed again: of a run that is longer now, or begins from other rates, the next step has
    the rate of its own schedule, not the last one of the checkpoint's.

    Args:
        changed: settings that stay those that the schedule was made with: "lr", its rates, and those of OF_SCHEDULES.

    Raises:
        CheckpointError: there are some, or the checkpoint has a schedule of another kind, and the rates of either follow from
            more than the step.
    """
    own = getattr(schedule, "scheduler", schedule)
    follows_steps = isinstance(own, LambdaLR)
    if not follows_steps or BY_STEP not in saved:
        other = [name for name in OF_SCHEDULES if name in changed]
        if not other and follows_steps != (BY_STEP in saved):
            other = ["kind of schedule"]
        if other:
            measured = type(own).__name__ if not follows_steps else "the schedule of the checkpoint"
            raise CheckpointError(
                f"resuming with another {OF_SCHEDULES.get(other[0], other[0])} under {measured}, whose rates follow from what "
                "was measured before. Valid: that of the checkpoint, or a new run from its weights"
            )
    if "lr" in changed:
        saved = {name: value for name, value in saved.items() if name != "base_lrs"}
    of_groups = {
        name: [value[number] for number in origin] for name, value in saved.items() if _is_of_groups(name, value)
    }
    schedule.load_state_dict(dict(saved) | of_groups)
    if follows_steps:
        _compute_rates(own)


def _compute_rates(schedule: LambdaLR) -> None:
    """Give an optimizer's groups the rates of the step that a schedule has come to."""
    rates = [base * factor(schedule.last_epoch) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas)]
    for group, base, rate in zip(schedule.optimizer.param_groups, schedule.base_lrs, rates):
        for name, value in (("initial_lr", base), ("lr", rate)):
            if isinstance(group.get(name), torch.Tensor):  # which a captured or compiled step reads
                group[name].fill_(value)
            else:
                group[name] = value
    schedule._last_lr = rates


def _order(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    """Names of an optimizer's weights, as it numbers them."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    unknown = [tuple(weight.shape) for weight in weights if id(weight) not in names]
    if unknown:
        raise CheckpointError(
            f"the optimizer changes {len(unknown)} tensors that the model does not save, of shapes {unknown[:3]}: they would be "
            "lost. Valid: an optimizer of the model's own weights"
        )
    return [names[id(weight)] for weight in weights]


def as_json(value: Any, what: str) -> Any:
    """The same value of JSON's kinds; numbers of torch and numpy become Python's, tuples lists.

    Raises:
        CheckpointError: there is none.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.Tensor, np.generic)) and math.prod(value.shape) == 1:
        return value.item()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, what) for item in value]
    of_keys = " whose keys are not text" if isinstance(value, Mapping) else ""
    raise CheckpointError(
        f"{what} is a {type(value).__name__}{of_keys}, which JSON has not, and checkpoints hold nothing that runs code when "
        "it is read. Valid: one made of numbers, text, lists and dictionaries, or save_strategy='no'"
    )


def random_state() -> bytes:
    """Return the state of this rank's generators: Python's, numpy's, torch's on the CPU and on the current device."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None,
    }
    return json.dumps(state).encode()


def restore_random_state(saved: bytes) -> None:
    """Goes on where `random_state` was, as far as there are the same kinds of device."""
    state = json.loads(saved)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
