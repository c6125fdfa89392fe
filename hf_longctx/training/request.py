"""The request of a run, as far as it is known: settings of a file, of a dry run, or of the trainer. refusals.py checks them.

Nothing is loaded, and nothing is sent between ranks.
"""

import json
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_longctx.parallel.sharding import expert_parallel
from hf_longctx.parallel.world import meets_in_rounds
from hf_longctx.planner.memory.state_bytes import Sharding
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.training import MUON

PLUGIN_FIELDS = frozenset(LongContextPlugin.model_fields)


@dataclass(frozen=True)
class Request:
    """Settings that are asked for, as far as they are known."""

    args: Any
    """TrainingArguments, or what `stated` makes of a file's"""
    plugin: LongContextPlugin | None
    """None: what was given for it is wrong, and said elsewhere"""
    model: Any = None
    processes: int | None = None
    sharding: Sharding | None = None
    """what the plugin's setting came to"""
    on_cpu: bool = False
    """whether ranks compute on CPUs: by setting, by the device that a dry run is for, or for want of a GPU here. A file by itself
    says the first alone"""

    @property
    def meets_in_rounds(self) -> bool:
        """Tell whether ranks meet in every micro-batch, as far as that is known."""
        assert self.plugin is not None
        return meets_in_rounds(self.sharding or self.plugin.sharding, expert_parallel(self.model))


def stated(training: dict[str, Any]) -> SimpleNamespace:
    """Arguments as a file states them, with TrainingArguments' defaults. TrainingArguments itself would look for devices and
    make process groups."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(TrainingArguments)
        if field.init and (field.default is not MISSING or field.default_factory is not MISSING)
    }
    given = SimpleNamespace(**defaults | {name: _parsed(value) for name, value in training.items()})
    given.optim = MUON if given.optim == MUON else OptimizerNames(given.optim)
    return given


def _parsed(value: Any) -> Any:
    """A mapping where it is given as JSON, as TrainingArguments takes it."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            return json.loads(value)
    return value
