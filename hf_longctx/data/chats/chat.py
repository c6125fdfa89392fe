"""Conversations -> text, by the tokenizer's chat template, and which characters of it the assistant writes.

1. What Arrow fills in is taken out (conversation.py), and what the template would leave out is refused (template_keys.py).
2. transformers renders the tokenizer's own template, in jinja's sandbox.
3. A template with {% generation %} marks what the assistant writes. With any other, a turn begins where the messages
   before it and the header of an answer (add_generation_prompt) end, and ends where the messages up to it end:

    messages[:1] and header   <user>Hi<end><assistant>
    messages[:2]              <user>Hi<end><assistant>Hello<end>
    all messages              <user>Hi<end><assistant>Hello<end><user>Bye<end>
    the assistant writes                              ^^^^^^^^^^

   Both must be how the whole text begins. Some templates write an earlier turn in another way once others follow it:
   they drop its reasoning. Where a turn stands is not guessed then: the row is refused.

   Rendering every beginning takes time that grows with the square of the messages. So an answer is first rendered after
   the system's messages and the last few others only, from a user's on; where what each answer and the messages before
   it add, one after the other, is the text itself, that is where they stand. Where it is not, beginnings are rendered.

A template that writes the date (strftime_now) writes the day on which it is rendered. Nothing is sent between ranks.
"""

import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from hf_longctx.data.chats.conversation import Conversation, Message, RowError
from hf_longctx.data.chats.template_keys import readable, refuse_unread_contents, refuse_unwritten

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""How transformers finds out that a template marks what the assistant writes."""

WINDOW = 4
"""Messages before an answer, or more, that it is first rendered with. Of a conversation of 840 short messages, spans take
0.08 s so and 1.6 s by beginnings; tokenising it takes 0.05 s."""

Span = tuple[int, int]
"""Characters [start, stop) of a text."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        ValueError: there is none, or it is no jinja template.
    """

    tokenizer: Any
    """a transformers tokenizer"""
    checked: bool = True
    """whether rows are refused of which the template leaves something out; False: conversations go to it as they are"""
    _proven: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """templates that have written contents that are strings"""

    def __post_init__(self) -> None:
        try:
            render_jinja_template([], chat_template=self.tokenizer.get_chat_template())
        except (AttributeError, NotImplementedError, ValueError, TemplateError) as error:
            raise ValueError(
                f"messages need a chat template, and {type(self.tokenizer).__name__} has none that can be used "
                f"({type(error).__name__}: {error}). Valid: a tokenizer with a chat template, such as an instruction-tuned "
                "model's, a jinja template in tokenizer.chat_template, or documents that are text already (kind='text')"
            ) from error

    def render(self, conversation: Conversation) -> str:
        """Return what `tokenizer.apply_chat_template(messages, tokenize=False)` gives; contents and arguments of tool calls
        are given to it in the form that the template reads (template_keys.py).

        Raises:
            RowError: the template refuses the messages; its own words are included. Or it leaves something out.
        """
        return self._text(self._readable(conversation))

    def render_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text of a conversation, and what the assistant writes in it from message `conversation.first` on.

        Raises:
            RowError: as `render`, or the template does not show which characters the assistant writes.
        """
        conversation = self._readable(conversation)
        messages, first = conversation.messages, conversation.first
        if not GENERATION.search(self.tokenizer.get_chat_template(tools=conversation.tools)):
            text = self._text(conversation)
            try:
                return text, self._turns(text, conversation, WINDOW)
            except RowError:
                return text, self._turns(text, conversation, len(messages))
        text, spans = self._render(conversation, messages, return_assistant_tokens_mask=True)
        prompt = self._render(conversation, messages[:first])[0] if first else ""
        if not text.startswith(prompt):
            raise _unclear(first, conversation)
        return text, [(start, stop) for start, stop in spans if stop > len(prompt)]

    def _readable(self, conversation: Conversation) -> Conversation:
        """Return the conversation as the template reads it, after everything in it has been seen to be written."""
        if not self.checked:
            return conversation
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if not conversation.is_plain:
            conversation = readable(conversation, self._text)
            refuse_unwritten(conversation, self._text, template)
        if template not in self._proven and refuse_unread_contents(conversation, self._text):
            self._proven.add(template)
        return conversation

    def _text(self, conversation: Conversation) -> str:
        return self._render(conversation, conversation.messages)[0]

    def _turns(self, text: str, conversation: Conversation, window: int) -> list[Span]:
        """The characters of each answer, without the header before it. Each is rendered after `window` messages or more:
        what it adds to them must be how the text goes on after the answer before it."""
        messages, spans, done, stop = conversation.messages, list[Span](), 0, 0
        for turn in range(conversation.first, len(messages)):
            if messages[turn]["role"] != "assistant":
                continue
            begin = next((i for i in range(done - window, 0, -1) if messages[i]["role"] == "user"), 0)
            system = list(takewhile(lambda message: message["role"] == "system", messages[:begin]))
            context, last = system + messages[begin:done], turn + 1 == len(messages)
            before = self._render(conversation, context)[0] if begin else text[:stop]
            header = self._render(conversation, context + messages[done:turn], add_generation_prompt=True)[0]
            after = text if last and not begin else self._render(conversation, context + messages[done : turn + 1])[0]
            added, start = after[len(before) :], stop + len(header) - len(before)
            if not (header.startswith(before) and after.startswith(header) and text.startswith(added, stop)):
                raise _unclear(turn + 1, conversation)
            done, stop = turn + 1, stop + len(added)
            if last and stop != len(text):
                raise _unclear(done, conversation)
            spans.append((start, stop))
        return spans

    def _render(self, conversation: Conversation, messages: list[Message], **settings: Any) -> tuple[str, list[Span]]:
        """A text, and what {% generation %} marks in it if `return_assistant_tokens_mask` is among the settings."""
        variables = {**self.tokenizer.special_tokens_map, **(conversation.variables or {})}
        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=conversation.tools,
                documents=conversation.documents,
                chat_template=self.tokenizer.get_chat_template(tools=conversation.tools),
                continue_final_message=False,
                **settings,
                **variables,
            )
        except Exception as error:  # whatever the template's author wrote may fail in any way
            raise RowError(
                f"the chat template cannot render it: {type(error).__name__}: {error}. Valid: messages, tools and "
                "chat_template_kwargs that the template accepts"
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if spans else []


def _unclear(count: int, conversation: Conversation) -> RowError:
    return RowError(
        f"the chat template does not show which characters the assistant writes: the first {count} of "
        f"{len(conversation.messages)} messages, rendered alone or up to the header of the last of them, are not how the "
        "conversation begins (as with templates that drop the reasoning of earlier turns). Valid: a template with "
        "{% generation %} around what the assistant writes, train_on='all', or columns prompt and completion, both "
        "messages, with one assistant turn in the completion"
    )
