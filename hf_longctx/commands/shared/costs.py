"""--model and --device on the command line -> what work costs.

A model is a preset, a directory with config.json, a hub id or embedded:smollm2-135m; only its configuration is read, and of
well-known ones (hardware/published.py), which may be named without their organisation, not even that. A device is a preset, or
a profile that `hf-longctx profile` wrote.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_longctx.commands.shared.models import published_sizes, transformers_config
from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded.embedded_model import prepare_model
from hf_longctx.hardware.devices import CPU_DEVICES, read_cluster
from hf_longctx.hardware.model_sizes import counted_model
from hf_longctx.hardware.published import ARCHITECTURES, PUBLISHED, Architecture, hub_id
from hf_longctx.planner import RankSpeed
from hf_longctx.precision import cpu_core, decide_for, kind_of
from hf_longctx.settings.fields import beside, did_you_mean, is_misspelt
from hf_longctx.settings.model import EMBEDDED_MODEL, HUB_ID, MODEL_FILE


@dataclass(frozen=True)
class Device:
    """The device that ranks run on."""

    speed: RankSpeed
    ranks_per_node: int | None
    """None: all share one"""
    note: str = ""
    """what it computes in, where names of devices do not say that"""


def read_device(name: str) -> Device:
    """A preset or a profile.

    Raises:
        ValueError: it is neither.
    """
    if name in CPU_DEVICES:
        decision = decide_for(name)
        return Device(cpu_core(kind_of(name), decision.bf16), None, str(decision))
    cluster = read_cluster(name, also=CPU_DEVICES)
    return Device(cluster.speed(), cluster.ranks_per_node)


def read_config(model: str) -> Any:
    """A configuration with the fields of transformers'. Raises ValueError if there is none of this name."""
    if (sizes := ARCHITECTURES.get(model) or published_sizes(published_id(model))) is not None:
        return sizes if isinstance(sizes, Architecture) else transformers_config(sizes)
    from transformers import AutoConfig

    well_known = sorted({known.rpartition("/")[2].lower() for known in PUBLISHED})
    names = [*ARCHITECTURES, *well_known]
    near = "" if "/" in model else did_you_mean(model, names)
    refusal = f"--model {model!r} is no preset ({', '.join(ARCHITECTURES)}), no well-known model ({', '.join(well_known)}){near}"
    if near and not Path(model).exists() and is_misspelt(model, names):
        raise ValueError(refusal)
    try:
        refuse_unreachable(model)
        return AutoConfig.from_pretrained(_path(model))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{refusal}, and transformers finds no configuration of that name: {str(error).splitlines()[0]}"
        ) from error


def read_tokenizer(model: str) -> Any:
    """transformers' tokenizer of a model. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    refuse_unreachable(model)
    try:
        return AutoTokenizer.from_pretrained(_path(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model!r} has no tokenizer: {str(error).splitlines()[0]}") from error


def refuse_unreachable(model: str) -> None:
    """Raises ValueError for a hub's model that is not in its cache where the hub cannot be reached."""
    if Path(model).exists() or not HUB_ID.fullmatch(model):
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(model, MODEL_FILE), str):
        return
    from hf_longctx.data.reading.layouts import HUB_SECONDS

    try:
        HfApi().model_info(model, timeout=HUB_SECONDS)  # transformers would try for up to 100 s
    except HfHubHTTPError:
        return  # the hub has answered; transformers finds the words for what it said
    except Exception as error:  # of any HTTP client
        raise ValueError(
            f"{model!r} is no directory here, and the hub cannot be reached ({type(error).__name__}). Valid: a directory that "
            f"save_pretrained wrote, or `hf download {model}` where there is a network; HF_HUB_OFFLINE=1 uses its cache alone"
            f"{beside(model)}"
        ) from error


def published_id(model: str) -> str:
    """The hub id of a published model, unless a directory has the name."""
    return model if Path(model).is_dir() else hub_id(model)


def _path(model: str) -> str:
    return str(prepare_model(default_cache_dir())) if model == EMBEDDED_MODEL else model


def counting_notes(config: Any) -> tuple[str, ...]:
    """Return what is not exact of the counts of a configuration, in words; nothing where there are formulas."""
    counted = counted_model(config)
    if counted is None:
        return ()
    state = counted.state_layers
    layers = (f"{state} of {len(counted.layers)} layers have no attention: what they compute is linear in the tokens",)
    return (*counted.notes, *(layers if state else ()))
