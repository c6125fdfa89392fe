"""Rows -> documents: token ids, and labels where not every token is learned.

    kind                columns               learned with train_on="assistant"        with train_on="all"
    tokens              input_ids (labels)    labels, else every token                 the same
    messages            messages              what the assistant writes (chats/)      every token
    prompt_completion   prompt, completion    the completion                           every token
    text                the text column       every token                              the same
    sharegpt, alpaca    see formats.py        what the assistant writes                every token

Token ids are always the tokenizer's own: those of `tokenizer(text)` for a text, those of `apply_chat_template` for
messages. A prompt and its completion are one text, not two that are joined. After a text and after a completion comes
the end token, and is learned, where the tokenizer has one and has not written it there itself; `add_eos` may say that
texts get none. A conversation ends as its template ends it. Where both are lists of messages they are one conversation, and what
the assistant writes in the completion is learned.

Which characters are learned is known before tokenising; a token is learned if one of its characters is, or more:

    text     <user>Hi<end><assistant>Hello<end>      tokens   <user> Hi <end> <assistant> Hel lo <end>
    learned                          ^^^^^^^^^^      labels     -100 -100  -100        -100 Hel lo <end>

Where a template has {% generation %}, that is the mask of transformers (return_assistant_tokens_mask), except for its
faults: transformers looks only for the tokens that hold the first and the last character of a span. Where no token holds
the first (white space that the tokenizer drops or leaves out of its offsets), it marks neither this span nor any other
after it; where no token holds the last, or token 0 does, it marks everything up to the end of the text; and where the
last character is several tokens, it marks the first of them.

A batch of rows is tokenised by one call of the tokenizer; nothing is done token by token in Python. Nothing is sent
between ranks.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from hf_longctx.data.chats.chat import ChatTemplate, Span
from hf_longctx.data.chats.conversation import EMPTY, Conversation, RowError, found
from hf_longctx.data.formats import RowFormat, alpaca, looks_like, preference_reason, sharegpt
from hf_longctx.data.length_index import IGNORE_INDEX
from hf_longctx.data.masks import mask_reason
from hf_longctx.data.media import ONLY_TEXT, media_column
from hf_longctx.data.packed import packed_reason
from hf_longctx.data.tokenizer_state import tokenizer_state

KINDS = ("auto", "tokens", "messages", "prompt_completion", "text", "sharegpt", "alpaca")
TRAIN_ON = ("assistant", "all")

VERSION = 2
"""Raised whenever the same rows give other documents than before: what was prepared by then is prepared anew. A run that
began with an older version keeps it when it is resumed: its documents must stay the same, and can be prepared again.

1: no end token after a text. Conversations go to the template as they are: `documents` is not passed, arguments of tool calls
   stay text, and nothing is refused for being left out, nor are images or packed rows
2: an end token, unless add_eos says otherwise; contents and arguments in the form that the template reads
   (chats/template_keys.py); rows are refused of which something would be ignored
"""


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens that are trained on: at least one can be learned."""

    input_ids: np.ndarray
    """int32 [T]"""
    labels: np.ndarray | None
    """int32 [T], IGNORE_INDEX where nothing is learned; None: every token is"""
    rendered: bool = False
    """whether a chat template decided its tokens"""


@dataclass(frozen=True)
class Text:
    """A row that is to be tokenised."""

    text: str
    spans: Sequence[Span] | None = None
    """characters that are learned, ascending; None: all"""
    rendered: bool = False
    """by a chat template, which writes the special tokens itself"""
    completed: bool = False
    """the end token comes last, and is learned"""


@dataclass(frozen=True)
class Tokenisation:
    """Turns rows into documents. Can be pickled, if the tokenizer can.

    Raises:
        ValueError: an unknown kind or train_on, or a tokenizer that cannot do what the kind needs. With kind "auto" the
            latter is raised when the first such row comes.
    """

    tokenizer: Any
    """a transformers tokenizer; may be None where rows hold tokens"""
    kind: str = "auto"
    """one of KINDS; auto: the first in their order whose columns a row has"""
    text_column: str = "text"
    """column of kind text"""
    train_on: str = "assistant"
    """one of TRAIN_ON"""
    add_eos: bool | None = None
    """whether a text ends with the end token; None: it does where the tokenizer has one"""
    version: int = VERSION
    """1 or VERSION: how documents are made"""
    format: RowFormat = field(default_factory=RowFormat)
    """how columns, message keys and roles are called"""

    def __post_init__(self) -> None:
        if not 1 <= self.version <= VERSION:
            raise ValueError(f"version={self.version} of documents is unknown; valid: 1 to {VERSION}")
        if self.version == 1 and self.add_eos:
            raise ValueError("add_eos=True with documents of version 1, which have no end tokens. Valid: add_eos=False")
        for name, value, valid in (("kind", self.kind, KINDS), ("train_on", self.train_on, TRAIN_ON)):
            if value not in valid:
                raise ValueError(f"{name}={value!r} is unknown; valid: {', '.join(valid)}")
        if self.kind != "auto":
            self._refuse_unable_tokenizer(self.kind)

    def kind_of(self, columns: Iterable[str]) -> str:
        """Return what rows with these columns hold: one of KINDS, never "auto".

        Raises:
            RowError: a column is missing; says which there are.
            ValueError: the tokenizer cannot do what the kind needs.
        """
        column_names = self.format.names(columns)
        for kind in KINDS[1:] if self.kind == "auto" else [self.kind]:
            if set(self._columns(kind)) <= set(column_names):
                self._refuse_unable_tokenizer(kind)
                return kind
        needed = [self._columns(kind) for kind in (KINDS[1:] if self.kind == "auto" else [self.kind])]
        raise RowError(
            f"the columns are {', '.join(map(repr, column_names)) or 'none'}{looks_like(column_names)}; "
            f"valid for kind={self.kind!r}: "
            + ", or ".join(" and ".join(map(repr, names)) for names in needed)
            + ("" if self.kind not in ("auto", "text") else " (text_column names another column of text, columns any)")
        )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        """The document of each row, or the reason why it is refused, which names the column, what was found and what is
        valid. The reason begins with EMPTY if the row is well-formed but teaches nothing.

        Raises:
            ValueError: the tokenizer cannot do what a row's kind needs.
        """
        documents: list[Document | str] = [""] * len(rows)
        texts: list[tuple[int, Text]] = []
        for place, row in enumerate(rows):
            try:
                read = self._read(row)
            except RowError as error:
                documents[place] = str(error)
            except RecursionError:
                documents[place] = "its values are nested too deeply; valid: what json can write and read"
            else:
                if isinstance(read, Text):
                    texts.append((place, read))
                else:
                    documents[place] = read
        for rendered in (False, True):
            chosen = [(place, text) for place, text in texts if text.rendered is rendered]
            for (place, _), document in zip(chosen, self._tokenised([text for _, text in chosen], rendered)):
                documents[place] = document
        return documents

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of all that decides which documents rows become: the settings and the tokenizer with its chat
        template, wherever it was loaded from."""
        settings: list[Any] = [self.version, self.kind, self.text_column, self.train_on]
        if self.version > 1:
            settings.append(self.ends_texts)
        if self.format:
            settings += [sorted(self.format.columns.items()), sorted(self.format.roles.items())]
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=16)
        if self.tokenizer is not None:
            for part in tokenizer_state(self.tokenizer):
                digest.update(hashlib.blake2b(part).digest())
        return digest.hexdigest()

    @property
    def ends_texts(self) -> bool:
        """whether texts end with the end token"""
        has_one = self.tokenizer is not None and self.tokenizer.eos_token_id is not None
        return has_one and self.version > 1 and self.add_eos is not False

    def warn_of_missing_end(self) -> None:
        """Says so if texts would end with the end token, and the tokenizer has none."""
        reads_texts = self.tokenizer is not None and self.kind in ("auto", "text")
        if reads_texts and self.add_eos is None and self.version > 1 and not self.ends_texts:
            warnings.warn(
                f"{type(self.tokenizer).__name__} has no end token: texts get none, and a model trained on them does not learn "
                "where they end. Set tokenizer.eos_token, or add_eos to false",
                stacklevel=3,
            )

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self._refuses_ignored)

    @property
    def _refuses_ignored(self) -> bool:
        return self.version > 1

    @cached_property
    def _vocabulary(self) -> int:
        """One more than the highest token id."""
        return 2**31 if self.tokenizer is None else max(self.tokenizer.get_vocab().values()) + 1

    def _columns(self, kind: str) -> tuple[str, ...]:
        return {
            "tokens": ("input_ids",),
            "messages": ("messages",),
            "prompt_completion": ("prompt", "completion"),
            "text": (self.text_column,),
            "sharegpt": ("conversations",),
            "alpaca": ("instruction", "output"),
        }[kind]

    def _refuse_unable_tokenizer(self, kind: str) -> None:
        if kind == "tokens":
            return
        if self.tokenizer is None:
            raise ValueError(f"kind={kind!r} needs a tokenizer; valid without one: rows with input_ids (kind='tokens')")
        if kind == "text" and self.add_eos and not self.ends_texts:
            raise ValueError(
                f"add_eos=True, and {type(self.tokenizer).__name__} has no end token. Valid: a tokenizer with an eos_token, or "
                "add_eos=False, which leaves texts without an end"
            )
        if kind in ("messages", "sharegpt", "alpaca"):
            ChatTemplate(self.tokenizer)
        if kind != "text" and self.train_on == "assistant" and not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"train_on='assistant' needs to know which characters each token stands for, and {type(self.tokenizer).__name__} "
                "cannot say it: it is not a fast tokenizer (one of the package tokenizers). Valid: the fast tokenizer of this "
                "model, train_on='all', or input_ids and labels made elsewhere (kind='tokens')"
            )

    def _read(self, row: Mapping[str, Any]) -> Text | Document:
        reads_answers = self._refuses_ignored and self.kind not in ("tokens", "text")
        if reads_answers and (reason := preference_reason(row)) is not None:
            raise RowError(reason)
        kind, row = self.kind_of(row), self.format.renamed(row)
        others = {name: value for name, value in row.items() if name not in self._columns(kind)}
        if self._refuses_ignored and (media := media_column(others)) is not None:
            raise RowError(f"column {media!r} holds {found(row[media])}, and {ONLY_TEXT}")
        if kind == "tokens":
            return self._tokens(row)
        if kind == "text":
            return Text(_string(row, self.text_column), completed=self.ends_texts)
        if kind in ("sharegpt", "alpaca"):
            row, kind = sharegpt(row, self.format.roles) if kind == "sharegpt" else alpaca(row), "messages"
        if kind == "messages" or all(isinstance(row[name], list | tuple) for name in self._columns(kind)):
            return self._conversation(Conversation.from_row(row, *self._columns(kind), checked=self._refuses_ignored))
        prompt, completion = (_string(row, name, empty=name == "prompt") for name in self._columns(kind))
        text = prompt + completion
        return Text(text, [(len(prompt), len(text))] if self.train_on == "assistant" else None, completed=True)

    def _conversation(self, conversation: Conversation) -> Text:
        if self.train_on == "all":
            text, spans = self._chat.render(conversation), None
        else:
            text, spans = self._chat.render_spans(conversation)
        _refuse_no_unicode(text, "a message")
        return Text(text, spans, rendered=True)

    def _tokens(self, row: Mapping[str, Any]) -> Document:
        input_ids = _integers(row, "input_ids")
        self._refuse_outside(input_ids, "input_ids")
        if self._refuses_ignored and (reason := packed_reason(row, len(input_ids))):
            raise RowError(reason)
        if reason := mask_reason(row):
            raise RowError(reason)
        if "labels" not in row:
            return _document(input_ids, None)
        labels = _integers(row, "labels")
        if len(labels) != len(input_ids):
            raise RowError(
                f"{len(input_ids)} input_ids, but {len(labels)} labels; valid: a label for every token, {IGNORE_INDEX} where "
                "nothing is learned"
            )
        self._refuse_outside(labels[labels != IGNORE_INDEX], "labels")
        return _document(input_ids, labels)

    def _refuse_outside(self, values: np.ndarray, name: str) -> None:
        if values.size and not 0 <= values.min() <= values.max() < self._vocabulary:
            ignored = f", or {IGNORE_INDEX} where nothing is learned" if name == "labels" else ""
            raise RowError(
                f"column {name!r} holds values from {values.min()} to {values.max()}; valid: 0 to {self._vocabulary - 1}, "
                f"{'what int32 holds' if self.tokenizer is None else 'the vocabulary of the tokenizer'}{ignored}"
            )

    def _tokenised(self, texts: list[Text], rendered: bool) -> Iterable[Document | str]:
        """Texts that are all rendered, or all not."""
        if not texts:
            return
        encoded = self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=not rendered,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a document may be longer than a tokenizer was told to warn of; it is never truncated
        )
        for number, (text, ids) in enumerate(zip(texts, encoded["input_ids"])):
            input_ids, labels = np.array(ids, np.int32), None
            if text.spans is not None:
                offsets = np.fromiter(chain.from_iterable(encoded.encodings[number].offsets), np.int64, 2 * len(ids))
                learned = learned_tokens(offsets.reshape(-1, 2), text.spans)
                labels = np.where(learned, input_ids, np.int32(IGNORE_INDEX))
            if text.completed:
                input_ids, labels = self._completed(input_ids, labels)
            try:
                yield replace(_document(input_ids, labels), rendered=rendered)
            except RowError as error:
                yield str(error)

    def _completed(self, input_ids: np.ndarray, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """[T or T + 1] each: with the end token, where the tokenizer has one."""
        end = self.tokenizer.eos_token_id
        if end is None or (len(input_ids) and input_ids[-1] == end):
            return input_ids, labels
        return np.append(input_ids, np.int32(end)), None if labels is None else np.append(labels, np.int32(end))


def learned_tokens(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """bool [T]: the tokens that hold a character of the spans.

    Some tokenizers leave spaces out of the offsets; a token of spaces alone has the place where it ends as its start and
    stop, and is counted as if it began a character before. Tokens that the tokenizer adds at the end of a text have offsets
    (0, 0), and are learned if the token before them is.

    Args:
        offsets: integers [T, 2]: first character of each token, and one past its last.
        spans: characters, ascending.
    """
    learned = np.zeros(len(offsets), bool)
    first, stop = offsets.T
    first = np.maximum.accumulate(np.where(first == stop, first - 1, first))
    stop = np.maximum.accumulate(stop)
    for begin, end in spans:
        if begin < end:
            learned[np.searchsorted(stop, begin, "right") : np.searchsorted(first, end, "left")] = True
    return learned


def _document(input_ids: np.ndarray, labels: np.ndarray | None) -> Document:
    """Integers [T] each, within int32. Raises RowError if no token can be learned."""
    if len(input_ids) < 2:
        raise RowError(
            f"{EMPTY}it has {len(input_ids)} tokens, and the first token of a document is predicted from nothing; valid: "
            "2 tokens or more"
        )
    if labels is not None and not (labels[1:] != IGNORE_INDEX).any():
        raise RowError(
            f"{EMPTY}none of its {len(labels)} tokens after the first is learned; valid: a label that is not {IGNORE_INDEX}, "
            "an assistant's message, or a completion"
        )
    return Document(
        input_ids.astype(np.int32, copy=False), None if labels is None else labels.astype(np.int32, copy=False)
    )


def _string(row: Mapping[str, Any], name: str, empty: bool = False) -> str:
    value = row[name]
    if not isinstance(value, str):
        other = "" if name not in ("prompt", "completion") else ", or lists of messages in both prompt and completion"
        raise RowError(f"column {name!r} holds {found(value)}; valid: a string{other}")
    if not value and not empty:
        raise RowError(f"{EMPTY}column {name!r} holds an empty string")
    _refuse_no_unicode(value, f"column {name!r}")
    return value


def _refuse_no_unicode(text: str, where: str) -> None:
    """Raises RowError for half of a surrogate pair, which JSON can spell and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{where} holds a character that is not Unicode ({error}); valid: text that UTF-8 can write"
        ) from error


def _integers(row: Mapping[str, Any], name: str) -> np.ndarray:
    """[T] integers of any width."""
    try:
        values = np.asarray(row[name])
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, for one
        values = np.asarray(None)
    if isinstance(row[name], list) and bool in set(map(type, row[name])):
        values = np.asarray(None)  # numpy counts True as 1 where integers stand beside it
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise RowError(f"column {name!r} holds {found(row[name])}; valid: a list of integers that int32 can hold")
    return values if values.size else values.astype(np.int64)
