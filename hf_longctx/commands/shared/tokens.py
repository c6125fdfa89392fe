"""Numbers of tokens on the command line: 32768, 32K, 32k, 2M."""

from collections.abc import Callable
from typing import Any

import typer

from hf_longctx.settings.fields import MOST_TOKENS, THOUSANDS

VALID = f"to {MOST_TOKENS}, as in 262144, 256K or 2M"


def token_count(least: int = 1) -> Callable[[Any], int]:
    """Return a parser of an option's number of tokens, `least` or more, which fails with what is valid."""

    def tokens(given: Any) -> int:
        try:
            size = given if isinstance(given, int) else read_size(given)
        except ValueError:
            size = least - 1
        if not least <= size <= MOST_TOKENS:
            raise typer.BadParameter(f"{given!r} is no number of tokens; valid: a whole number from {least} {VALID}")
        return size

    return tokens


def read_size(text: str) -> int:
    """Return the number of tokens that 2M, 256k or 32_768 stands for. Raises ValueError if it stands for none."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in THOUSANDS else (text, "")
    return int(number.replace("_", "")) * THOUSANDS.get(unit, 1)


def size_of(text: str, option: str) -> int:
    """Tokens: 2M, 256K, 32768. Raises ValueError, naming the option."""
    try:
        size = read_size(text)
    except ValueError:
        size = 0
    if not 1 <= size <= MOST_TOKENS:
        raise ValueError(f"{option} {text!r} is no number of tokens; valid: a whole number from 1 {VALID}")
    return size
