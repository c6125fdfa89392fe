"""`hf-longctx generate`: goes on from a prompt that is too long for one rank to read alone.

    hf-longctx generate runs/mine --prompt-file book.txt --ranks 8

1. All ranks read the prompt, all but its last token, each its share (`prefill`).
2. The first rank receives the keys and values as an ordinary cache.
3. transformers' `generate` goes on there, from the last token, and writes as it goes; the others wait.

The text is what transformers alone would write, up to rounding: tests compare it in float32. In bfloat16 two tokens of nearly the
same logit may change places with the number of ranks. The first rank needs room for the whole cache.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_longctx.commands.shared.inference_precision import DTYPE_HELP, InferenceDtype, inference_precision
from hf_longctx.commands.shared.loading import UNCERTIFIED_HELP
from hf_longctx.commands.shared.tokens import token_count


@dataclass(frozen=True)
class Wanted:
    """Options of one generation."""

    model: str
    prompt: str
    chat: bool
    max_new_tokens: int
    temperature: float
    seed: int
    dtype: InferenceDtype
    uncertified: bool = False


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="Directory of a model, checkpoint, run or adapter; a hub id; embedded:smollm2-135m.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="Go on from this text.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Go on from the text in this file.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt for a user's message: use the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(parser=token_count(), help="Write at most so many tokens.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Draw tokens at this temperature; 0: take the likeliest.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Draw by this seed, with a temperature.")] = 0,
    dtype: Annotated[InferenceDtype, typer.Option(help=DTYPE_HELP)] = "auto",
    uncertified: Annotated[bool, typer.Option("--uncertified", help=UNCERTIFIED_HELP)] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Start so many processes; by default one per GPU here.", show_default=False),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on processors, even if there is a GPU.")] = False,
) -> None:
    """Go on from a long prompt: all processes read it, the first one writes.

    Example: hf-longctx generate embedded:smollm2-135m --prompt "Long documents are" --max-new-tokens 16
    """
    from hf_longctx.commands.shared.loading import resolved
    from hf_longctx.commands.shared.ranks import launched, on_ranks

    if not launched():
        resolved(model)
    text = _read(prompt, prompt_file)
    wanted = Wanted(model, text, chat, max_new_tokens, temperature, seed, dtype, uncertified)
    on_ranks(generate_on_rank, wanted, ranks=ranks, cpu=cpu)


def _read(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        given = "neither" if prompt is None else "both"
        raise ValueError(f"give exactly one of --prompt TEXT and --prompt-file FILE, got {given}")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{prompt_file} is no text in UTF-8: {error}") from None
    if not prompt:
        raise ValueError("the prompt is empty: give some text to go on from")
    return prompt


def generate_on_rank(device: Any, exchange: Any, wanted: Wanted) -> None:
    """Do one rank's part of it."""
    from hf_longctx.commands.shared.loading import load_model, load_tokenizer, resolved
    from hf_longctx.commands.shared.ranks import first_process_first
    from hf_longctx.inference.score import prefill
    from hf_longctx.models.documents import longest_of, refuse_beyond_positions
    from hf_longctx.models.whole_prompt import NoCache

    with first_process_first():
        path = resolved(wanted.model)
        tokenizer = load_tokenizer(path)
    ids = prompt_ids(tokenizer, wanted)
    precision = inference_precision([path], wanted.dtype, device)
    model = load_model(path, precision.weights, device, wanted.uncertified)
    if (most := longest_of(model)) is not None:
        room = most + 1 - len(ids)  # the last token that is written is not read
        refuse_beyond_positions(
            model,
            len(ids) + wanted.max_new_tokens - 1,
            f"the prompt of {len(ids)} tokens, with all but the last of {wanted.max_new_tokens} new ones,",
            f", such as --max-new-tokens {room}" if room > 0 else "",
        )
    with precision.computing(device, keep_casts=True):
        cache, use_cache = None, True
        if len(ids) > 1:
            try:
                _, cache = prefill(model, ids[:-1], exchange=exchange, to=0)
            except NoCache:
                use_cache = False
        if exchange is None or exchange.rank == 0:
            _write(model, tokenizer, ids.to(device), cache, use_cache, wanted)


def _write(model: Any, tokenizer: Any, ids: Any, cache: Any, use_cache: bool, wanted: Wanted) -> None:
    """Go on from the prompt's last token, and write as it goes.

    Args:
        ids: int64 [T], the whole prompt.
        cache: of all tokens but the last; None: there is no other, or the model makes none.
        use_cache: False for a model that makes none, and reads all text again for each token.
    """
    import torch
    from transformers import LogitsProcessorList, TextStreamer

    from hf_longctx.commands.checkpoints.checkpoint_weights import advice

    def refuse_not_finite(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A token that may not come has -inf."""
        if bool((scores.isnan() | scores.isposinf()).any()):
            raise ValueError(
                f"some logits of {wanted.model} are not finite: there is no next token. {advice(model.dtype)}"
            )
        return scores

    torch.manual_seed(wanted.seed)
    if wanted.temperature > 0:
        settings: dict[str, Any] = {"do_sample": True, "temperature": wanted.temperature}
    else:  # what a model brings of sampling does not count
        settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if model.generation_config.pad_token_id is None:  # nothing is padded: transformers wants one all the same
        settings["pad_token_id"] = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    names = inspect.signature(type(model).forward).parameters
    settings["cache_params" if "cache_params" in names else "past_key_values"] = cache
    model.generate(
        ids[None],
        attention_mask=torch.ones_like(ids[None]),
        use_cache=use_cache,
        max_new_tokens=wanted.max_new_tokens,
        logits_processor=LogitsProcessorList([refuse_not_finite]),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **settings,
    )


def prompt_ids(tokenizer: Any, wanted: Wanted) -> Any:
    """int64 [T], at least one token.

    Raises:
        ValueError: --chat without a template, or no token.
    """
    import torch

    if not wanted.chat:
        ids = tokenizer(wanted.prompt, verbose=False)["input_ids"]
    elif tokenizer.chat_template is None:
        raise ValueError(f"--chat, but the tokenizer of {wanted.model} has no chat template: leave --chat out")
    else:
        messages = [{"role": "user", "content": wanted.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise ValueError("the prompt makes no token: give some text to go on from")
    return torch.tensor(ids)
