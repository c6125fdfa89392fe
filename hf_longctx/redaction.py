"""Hides what a page, a card or a saved file of settings must never show: tokens, passwords, and addresses that carry them.

A value is hidden whole where its key names a secret (hub_token, api_key ...). Elsewhere what looks like one inside a
text is: the user's part of an address, a query that signs it, tokens as hubs and clouds write them. Environment variables
are never read. Nothing is sent.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "(hidden)"
MOST_ENTRIES = 20
"""Entries of a list that are shown; a directory may hold more files than anyone reads."""

_SECRET_KEY = re.compile(r"(tokens?|secret|password|passwd|passphrase|credentials?|key)$", re.I)
_PASSWORD_KEY = re.compile(r"(secret|password|passwd|passphrase|credentials?)$", re.I)
"""Names of secrets that may be numbers; keys and tokens are counted too."""
_OF_A_VOCABULARY = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|added|special|extra|stop|image|audio|video)(_special)?_tokens?$", re.I
)
_NAMED = r"[^=&\s]*(?:sig|signature|token|key|secret|credential|password)[^=&\s]*"
_IN_TEXT = (
    (re.compile(r"(?<=://)[^/\s@]+@"), ""),
    (re.compile(rf"(?<=[?&])({_NAMED})=[^&\s]+", re.I), rf"\1={HIDDEN}"),
    (re.compile(r"\b(?:hf_|api_org_|sk-|ghp_|gho_|github_pat_|xox[bp]-|wandb_v1_)[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
)


def without_named_secrets(value: Any) -> Any:
    """A copy of nested mappings and lists without values whose keys name secrets: all else stays as it is, to be read again."""
    return _copied(value, "", lambda single: single, None)


def redacted(value: Any, key: str = "") -> Any:
    """A copy of nested mappings, lists, texts and numbers without secrets, its long lists shortened; `key`: its name, if any."""
    return _copied(value, key, _shown, MOST_ENTRIES)


def _copied(value: Any, key: str, single: Callable[[Any], Any], most: int | None) -> Any:
    """Copy nested mappings and lists.

    Args:
        key: of the mapping that the value stands in.
        single: what becomes of a value that is neither, and no secret by its key.
        most: entries of a list that are kept; None: all.
    """
    if _is_named_secret(value, key):
        return HIDDEN
    if isinstance(value, Mapping):
        return {str(name): _copied(item, str(name), single, most) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        kept = [_copied(item, key, single, most) for item in value[:most]]
        left_out = len(value) - len(kept)
        return [*kept, f"... and {left_out:,} more"] if left_out else kept
    return single(value)


def _is_named_secret(value: Any, key: str) -> bool:
    if isinstance(value, str):
        return bool(_SECRET_KEY.search(key)) and not _OF_A_VOCABULARY.search(key)
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(_PASSWORD_KEY.search(key))


def _shown(value: Any) -> Any:
    """Return a number as it is, and what else can be written as a text without secrets."""
    if isinstance(value, (int, float, type(None))):
        return value
    text = str(value)
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text
