"""MODEL on the command line -> a model that runs over layouts, and its tokenizer.

    ./folder, org/name            what transformers loads: a model, or a checkpoint of a run
    runs/mine                     a run's output directory that holds checkpoints only: its newest valid one
    runs/lora                     adapters of PEFT: on the weights that they name, with the configuration beside them, if any
    embedded:smollm2-135m         the embedded model

Nothing is sent between ranks; each holds the whole model. No code that comes with a model is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from hf_longctx.settings.fields import beside

ADAPTER = "adapter_config.json"
UNCERTIFIED_HELP = "Take a model of which no tiny copy could be tested."
NOT_WRITTEN = "Error while serializing"
"""How safetensors begins an error of writing."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype that weights are loaded in; auto: as they were saved."""


def resolved(name: str) -> str:
    """The folder or hub id that a name of MODEL stands for.

    Raises:
        ValueError: it is a folder without a model, a file, or nothing that is here or on a hub that can be reached.
    """
    from huggingface_hub import constants

    from hf_longctx.checkpoint.folder import checkpoints, problem_of
    from hf_longctx.commands.shared.costs import refuse_unreachable
    from hf_longctx.data.cache import default_cache_dir
    from hf_longctx.data.embedded.embedded_model import DIRECTORY, prepare_model
    from hf_longctx.settings import EMBEDDED_MODEL
    from hf_longctx.settings.model import HUB_ID

    path = Path(name)
    # An adapter names the folder of the embedded model on the machine on which it was trained.
    if name == EMBEDDED_MODEL or (path.name == DIRECTORY and not path.is_dir()):
        return str(prepare_model(default_cache_dir()))
    valid = f"a folder that save_pretrained or a run has written, a hub's org/name, or {EMBEDDED_MODEL}"
    if path.is_file():
        raise ValueError(f"{name} is a file: MODEL is {valid}")
    if not path.is_dir():
        if not HUB_ID.fullmatch(name):
            raise ValueError(f"{name!r} is no folder here{beside(name)}: MODEL is {valid}")
        refuse_unreachable(name)
        if (
            constants.HF_HUB_OFFLINE
            and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir()
        ):
            raise ValueError(
                f"{name!r} is no folder here, nor in the hub's cache, and HF_HUB_OFFLINE is set{beside(name)}: MODEL is {valid}"
            )
        return name
    if (path / "config.json").is_file() or (path / ADAPTER).is_file():
        return name
    candidates = checkpoints(path)
    problems = []
    for checkpoint in candidates:
        problem = problem_of(checkpoint)
        if problem is None:
            return str(checkpoint)
        problems.append(problem)
    if problems:
        raise ValueError(f"none of the {len(candidates)} checkpoints in {path} is valid: {'; '.join(problems)}")
    raise ValueError(f"{path} holds no config.json, no {ADAPTER} and no checkpoint-*: MODEL is {valid}")


def load_model(name: str, dtype: Dtype, device: Any, uncertified: bool = False) -> Any:
    """A patched model on a device, in evaluation mode.

    Args:
        name: as `resolved` returns it.
        dtype: of the weights; inference_precision.py chooses it.
        uncertified: take a model that could not be tested; see `hf_longctx.patch_model`.

    Raises:
        ValueError: there is no such model, its weights are not finite in this dtype, or its family is not one that runs over
            layouts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from hf_longctx.certified_patch import patch_model
    from hf_longctx.commands.checkpoints.checkpoint_weights import refuse_not_finite

    logging.disable_progress_bar()
    settings: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    with _loadable(name):
        if (Path(name) / ADAPTER).is_file():
            model = _adapted(Path(name), settings)
        else:
            with readable_weights(name):
                model = AutoModelForCausalLM.from_pretrained(name, config=_evaluated_config(name), **settings)
    refuse_not_finite(model, name)
    return patch_model(model.to(device), uncertified=uncertified).eval()


@contextmanager
def _loadable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"MODEL {name!r} cannot be loaded: {first_line(error)}") from error


def saved_config(name: str) -> Any:
    """transformers' configuration that a model is loaded with; adapters without one have their base's. `name` as `resolved`
    returns it.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoConfig

    path = Path(name)
    with _loadable(name):
        own = not (path / ADAPTER).is_file() or (path / "config.json").is_file()
        return AutoConfig.from_pretrained(name if own else _base_of(path))


def _evaluated_config(name: str) -> Any:
    """Read a model's configuration, with the dropout of attention that it trains with (GPT-2 does, for instance) set to 0."""
    from hf_longctx.models.general import drop_nothing

    config = saved_config(name)
    drop_nothing(config.get_text_config(decoder=True))
    return config


@contextmanager
def readable_weights(*folders: str | Path | None) -> Iterator[None]:
    """Name damaged files: where safetensors cannot read a file, which says neither which nor what to do, this names those in
    `folders` that are damaged. Other names than folders are passed over. A file that could not be written is none of them."""
    from safetensors import SafetensorError, safe_open

    try:
        yield
    except SafetensorError as error:
        if str(error).startswith(NOT_WRITTEN):
            raise OSError(f"weights could not be written: {error}") from error
        damaged = []
        for path in sorted(path for folder in folders if folder for path in Path(folder).glob("*.safetensors")):
            try:
                with safe_open(path, "pt"):
                    pass
            except (SafetensorError, OSError):
                damaged.append(str(path))
        names = ", ".join(damaged) or ", ".join(str(folder) for folder in folders if folder)
        raise ValueError(
            f"{names} cannot be read ({error}): it is damaged, or its copy was cut off. Save or copy it again"
        ) from error


def _adapted(path: Path, settings: dict[str, Any]) -> Any:
    """The weights that an adapter stands on, with it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hf_longctx.models.adapters.new_rows import add_rows

    base, config = _base_of(path), _evaluated_config(str(path))
    rows = with_rows_of(config, base)
    with readable_weights(base, path):
        model = AutoModelForCausalLM.from_pretrained(base, config=config, **settings)
        add_rows(model, rows)
        generate_as_trained(model, path, base)
        try:
            return PeftModel.from_pretrained(model, str(path))
        except RuntimeError as error:
            raise ValueError(f"{path} does not fit {base}, on which it says it stands: {first_line(error)}") from error


def generate_as_trained(model: Any, adapter: Path, base: str) -> None:
    """Have a model generate as adapters were trained to: other tokens than its base's may end texts.

    Args:
        model: what they stand on.
        adapter: their folder. Where it has no generation_config.json, as one that was saved earlier, the end token of its
            config.json counts if the base has another.
        base: as `resolved` returns it.
    """
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    if not model.can_generate():
        return
    if (adapter / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(adapter)
    elif (adapter / "config.json").is_file() and (end := _end_token(str(adapter))) != _end_token(base):
        model.generation_config.eos_token_id = end


def _end_token(name: str) -> int | list[int] | None:
    """Return what ends texts as the configuration of a model says it."""
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(name).get_text_config(), "eos_token_id", None)


def with_rows_of(config: Any, base: str) -> int:
    """Give a configuration the vocabulary of the weights that it is loaded with; returns the tokens that adapters on them know.

    Args:
        config: that adapters were trained with.
        base: as `resolved` returns it.
    """
    from transformers import AutoConfig

    text = config.get_text_config()
    rows = text.vocab_size
    text.vocab_size = AutoConfig.from_pretrained(base).get_text_config().vocab_size
    return int(rows)


def _base_of(path: Path) -> str:
    """Find the weights that an adapter stands on, as `resolved` returns them.

    Raises:
        ValueError: they are not there, or it does not say which they are.
    """
    from peft import PeftConfig

    try:
        named = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / ADAPTER} is no configuration of an adapter: {error}") from error
    if not named:
        raise ValueError(f"{path} does not say which weights it stands on: base_model_name_or_path of {ADAPTER}")
    try:
        return resolved(named)
    except ValueError as error:
        raise ValueError(
            f"{path} stands on {named!r}, which is not there ({error}). `hf-longctx merge --base` puts it into weights that are"
        ) from error


def load_tokenizer(name: str) -> Any:
    """transformers' tokenizer of a model; adapters without one have their base's. `name` as `resolved` returns it.

    Raises:
        ValueError: there is none.
    """
    from peft import PeftConfig
    from transformers import AutoTokenizer

    from hf_longctx.run_documents import TOKENIZER_FILES, has_tokenizer

    path = Path(name)
    if (path / ADAPTER).is_file() and not has_tokenizer(name):
        name = resolved(PeftConfig.from_pretrained(name).base_model_name_or_path or name)
    if not has_tokenizer(name):
        raise ValueError(
            f"MODEL {name!r} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there, as after training on tokens. Copy "
            "its tokenizer into it"
        )
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"MODEL {name!r} has no tokenizer: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return the first line of what a library says, which may be a page; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()
