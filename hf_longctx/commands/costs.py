"""--model and --device on the command line -> what work costs.

A model is a preset, a directory with config.json, a hub id or embedded:smollm2-135m; only its configuration is read. A
device is a preset, or a profile of a machine, which `hf-longctx profile` wrote.
"""

from dataclasses import dataclass
from typing import Any

from hf_longctx.config import EMBEDDED_MODEL
from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded_model import prepare_model
from hf_longctx.planner import CPU_CORE, RankSpeed
from hf_longctx.simulator.architectures import ARCHITECTURES
from hf_longctx.simulator.hardware import CLUSTERS, from_profile


@dataclass(frozen=True)
class Device:
    """What ranks run on."""

    speed: RankSpeed
    ranks_per_node: int | None
    """None: all share one"""


def read_device(name: str) -> Device:
    """A preset or a profile.

    Raises:
        ValueError: it is neither.
    """
    if name == "cpu":
        return Device(CPU_CORE, None)
    if name not in CLUSTERS and not name.endswith(".json"):
        raise ValueError(
            f"--device {name!r} is unknown; valid: {', '.join(CLUSTERS)}, cpu, or a .json file that `hf-longctx profile` wrote"
        )
    cluster = CLUSTERS[name] if name in CLUSTERS else from_profile(name)
    return Device(cluster.speed(), cluster.ranks_per_node)


def read_config(model: str) -> Any:
    """A configuration with the fields of transformers'. Raises ValueError if there is none of this name."""
    if model in ARCHITECTURES:
        return ARCHITECTURES[model]
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(_path(model))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {model!r} is no preset ({', '.join(ARCHITECTURES)}), and transformers finds no configuration of that name: "
            f"{str(error).splitlines()[0]}"
        ) from error


def read_tokenizer(model: str) -> Any:
    """transformers' tokenizer of a model. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    if model in ARCHITECTURES:
        raise ValueError(
            f"--text-column needs a tokenizer, and --model {model!r} is a preset, which has none: name a directory or hub id"
        )
    try:
        return AutoTokenizer.from_pretrained(_path(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model!r} has no tokenizer: {str(error).splitlines()[0]}") from error


def _path(model: str) -> str:
    return str(prepare_model(default_cache_dir())) if model == EMBEDDED_MODEL else model
