"""An adapter and the weights it stands on, added up.

Each weight and its adapter's update, alpha / r * B A for LoRA, are written as one weight. One process, on CPU, which holds the
whole model.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merge_adapter(
    adapter: Path, output: Path, *, base: str | None = None, dtype: str = "auto", called: Path | None = None
) -> None:
    """Write an adapter merged into its base as a plain checkpoint, and say so.

    Args:
        adapter: a folder of PEFT's.
        output: empty or not there yet.
        base: its base's weights; None: as the adapter says.
        dtype: of the weights; auto: the base's.
        called: what to call `output`; None: its own name.

    Raises:
        ValueError: `adapter` holds none in safetensors, `output` is not empty, or the two do not belong together.
    """
    from transformers.utils import logging

    from hf_longctx.checkpoint.folder import share
    from hf_longctx.commands.shared.outputs import refuse_unwritable
    from hf_longctx.whole_files import built_whole

    if missing := [name for name in (CONFIG, WEIGHTS) if not (adapter / name).is_file()]:
        raise ValueError(
            f"{adapter} holds no {' and no '.join(missing)}: ADAPTER is a directory that PEFT's save_pretrained wrote, with "
            "safetensors"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty directory: give another OUTPUT, or remove it")
    refuse_unwritable(output.parent, f"OUTPUT {output}")
    logging.disable_progress_bar()
    model, base = merged(adapter, base, dtype)
    with built_whole(output) as folder:
        model.save_pretrained(folder)
        tokenizer = _save_tokenizer(adapter, base, folder)
        share(folder)
    size = f"{model.num_parameters():,} weights, {model.dtype}"
    print(f"{called or output}: {adapter} merged into {given_name(base)}, {size}; {tokenizer}")


def merged(adapter: Path, base: str | None, dtype: str) -> tuple[Any, str]:
    """The merged model, and the name of its base.

    Raises:
        ValueError: the base cannot be found, the adapter does not fit it, or cannot be merged.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    from hf_longctx.commands.checkpoints.checkpoint_weights import refuse_not_finite
    from hf_longctx.commands.shared.loading import first_line, generate_as_trained, readable_weights
    from hf_longctx.models.adapters.new_rows import add_rows

    try:
        adapter_config = PeftConfig.from_pretrained(str(adapter))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{adapter / CONFIG} is no configuration of an adapter: {error}") from error
    if adapter_config.is_prompt_learning:
        raise ValueError(f"{adapter} holds virtual tokens ({adapter_config.peft_type.value}), not weights to merge")
    name, config, rows = _base_config(adapter, adapter_config, base)
    try:
        with readable_weights(name):
            model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, use_safetensors=True)
            add_rows(model, rows)
            generate_as_trained(model, adapter, name)
    except OSError as error:
        raise ValueError(
            f"the weights that {adapter} stands on, {name!r}, cannot be loaded: {first_line(error)}. Say where they are with "
            "--base PATH"
        ) from error
    with readable_weights(adapter), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # PEFT's use of what transformers deprecates: nothing a user can change
        try:
            adapted = PeftModel.from_pretrained(model, str(adapter))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{adapter} does not fit {name}: {error}. Give the right one with --base") from error
    # PEFT saves embeddings and head whole beside adapters where the vocabulary has grown.
    least, most = (set(get_peft_model_state_dict(adapted, save_embedding_layers=whole)) for whole in (False, True))
    with safe_open(adapter / WEIGHTS, "pt") as file:
        odd = sorted((set(file.keys()) - most) | (least - set(file.keys())))
    if odd:
        raise ValueError(
            f"{adapter} does not fit {name}: {len(odd)} of its weights have no counterpart ({odd[0]}, ...). Give the right base "
            "with --base"
        )
    whole = adapted.merge_and_unload(safe_merge=True)
    refuse_not_finite(whole, f"{adapter} merged into {name}")
    return whole, name


def _base_config(adapter: Path, adapter_config: PeftConfig, base: str | None) -> tuple[str, Any, int]:
    """Return where the base is, the configuration that the adapter was trained with, which is the base's unless the adapter has
    one, and the tokens it knows."""
    from transformers import AutoConfig

    from hf_longctx.commands.shared.loading import resolved, with_rows_of

    name = base or adapter_config.base_model_name_or_path
    if not name:
        raise ValueError(f"{adapter} does not say which weights it stands on: give them with --base PATH")
    try:
        name = resolved(name)
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{adapter} stands on {name!r}, and transformers finds no model there ({str(error).splitlines()[0]}): say where the "
            "weights are with --base PATH"
        ) from error
    if not (adapter / "config.json").is_file():
        return name, config, config.get_text_config().vocab_size
    trained = AutoConfig.from_pretrained(adapter)
    rows = with_rows_of(trained, name)
    if hasattr(config, "quantization_config"):  # how the base is read
        trained.quantization_config = config.quantization_config
    return name, trained, rows


def _save_tokenizer(adapter: Path, base: str, output: Path) -> str:
    """Copies the adapter's tokenizer, or else the base's, if there is one. Says what it did."""
    from transformers import AutoTokenizer

    source = str(adapter) if (adapter / "tokenizer_config.json").is_file() else base
    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(output)
    except (OSError, ValueError):
        return "no tokenizer: neither the adapter nor the base has one"
    return f"tokenizer of {given_name(source)}"


def given_name(base: str) -> str:
    """Return what a user calls a model: the embedded one lies in the cache under a name of its own."""
    from hf_longctx.data.embedded.embedded_model import DIRECTORY
    from hf_longctx.settings import EMBEDDED_MODEL

    return EMBEDDED_MODEL if Path(base).name == DIRECTORY else base
