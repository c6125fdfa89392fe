"""MODEL on the command line -> a model that runs over layouts, and its tokenizer.

    ./folder, org/name            what transformers loads: a model, or a checkpoint of a run
    runs/mine                     a run's output directory that holds checkpoints only: its newest valid one
    runs/lora                     adapters of PEFT: on the weights that they name, with the configuration beside them, if any
    embedded:smollm2-135m         the embedded model

Nothing is sent between ranks; each holds the whole model. No code that comes with a model is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

ADAPTER = "adapter_config.json"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""--dtype on the command line."""


def resolved(name: str) -> str:
    """The folder or hub id that a name of MODEL stands for.

    Raises:
        ValueError: it is a folder without a model.
    """
    from hf_longctx.data.cache import default_cache_dir
    from hf_longctx.data.embedded_model import prepare_model
    from hf_longctx.sections import EMBEDDED_MODEL
    from hf_longctx.training.checkpoint.folder import checkpoints, problem_of

    if name == EMBEDDED_MODEL:
        return str(prepare_model(default_cache_dir()))
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file() or (path / ADAPTER).is_file():
        return name
    found = checkpoints(path)
    problems = []
    for each in found:
        problem = problem_of(each)
        if problem is None:
            return str(each)
        problems.append(problem)
    if problems:
        raise ValueError(f"none of the {len(found)} checkpoints in {path} is valid: {'; '.join(problems)}")
    raise ValueError(
        f"{path} holds no config.json, no {ADAPTER} and no checkpoint-*: MODEL is a folder that save_pretrained or a run has "
        f"written, a hub's org/name, or {EMBEDDED_MODEL}"
    )


def load_model(name: str, dtype: Dtype, device: Any) -> Any:
    """A patched model on a device, in evaluation mode.

    Args:
        name: as `resolved` returns it.
        dtype: of the weights; auto: as they were saved.

    Raises:
        ValueError: there is no such model, or its family is not one that runs over layouts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hf_longctx.models.patch import patch_model

    logging.disable_progress_bar()
    settings: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    try:
        if (Path(name) / ADAPTER).is_file():
            model = _adapted(Path(name), settings)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, **settings)
    except OSError as error:
        raise ValueError(f"MODEL {name!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return patch_model(model.to(device)).eval()


def _adapted(path: Path, settings: dict[str, Any]) -> Any:
    """The weights that an adapter stands on, with it."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
    if not base:
        raise ValueError(f"{path} does not say which weights it stands on: base_model_name_or_path of {ADAPTER}")
    base = resolved(base)
    config = AutoConfig.from_pretrained(str(path) if (path / "config.json").is_file() else base)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, config=config, **settings), str(path))


def load_tokenizer(name: str) -> Any:
    """transformers' tokenizer of a model; adapters without one have their base's. `name` as `resolved` returns it.

    Raises:
        ValueError: there is none.
    """
    from peft import PeftConfig
    from transformers import AutoTokenizer

    path = Path(name)
    if (path / ADAPTER).is_file() and not (path / "tokenizer_config.json").is_file():
        name = resolved(PeftConfig.from_pretrained(name).base_model_name_or_path or name)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"MODEL {name!r} has no tokenizer: {str(error).strip().splitlines()[0]}") from error
