"""Rows that quote their own calls, rows of hundreds of messages, values that are null, and rows of runs from before anything
was refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.data.chats.conversation import Conversation
from hf_longctx.data.chats.shipped_templates import TEMPLATES
from hf_longctx.data.chats.template_keys import readable, refuse_unwritten
from hf_longctx.data.prepare import Part, prepare
from hf_longctx.data.prepared import load_prepared
from hf_longctx.data.reading.source import Source
from hf_longctx.data.tokenisation import Document, Tokenisation
from tests.builders.chat_templates import TOOLS, tokenizers, with_template
from tests.builders.tokenised_rows import document, refusal

TOKENIZER = tokenizers()["tools"]
Message = dict[str, Any]
ASKED: Message = {"role": "user", "content": "Rome?"}
SAID: Message = {"role": "assistant", "content": "It is hot"}
ARGUMENTS: Message = {"city": "Rome"}


def ids(messages: list[Message], **settings: Any) -> list[int]:
    """Token ids that transformers gives."""
    return list(TOKENIZER.apply_chat_template(messages, **settings, return_dict=False))


def call(arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)])
@pytest.mark.parametrize(
    "quoted", [str(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS)), str({"type": "text", "text": "Rome?"})]
)
def test_an_answer_may_quote_arguments_and_parts(arguments: Any, quoted: str):
    asked = ASKED | {"content": [{"type": "text", "text": "Rome?"}]}
    answer = {"role": "tool", "content": f"TypeError: weather() got {quoted}"}
    tokenised = document(TOKENIZER, {"messages": [asked, calling(call(arguments)), answer, SAID]}, train_on="all")
    messages = [ASKED, calling(call()), answer, SAID]
    assert tokenised.input_ids.tolist() == ids(messages)


def test_what_a_template_quotes_it_does_not_read():
    written = "{{ call['function'] | tojson }}"
    assert written in TOOLS
    quoting = with_template(
        TOKENIZER, TOOLS.replace(written, "{{ call.function.name ~ (call.function.arguments | string | tojson) }}")
    )
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        reason = refusal(quoting, {"messages": [ASKED, calling(call(arguments))]})
        assert reason.startswith("the chat template does not read the arguments of messages[1].tool_calls[0]")
    dumping = with_template(
        TOKENIZER, TOOLS.replace("{{ part['text'] }}", "{{ part }}").replace("is string", "is mapping")
    )
    image = {"type": "thinking", "thinking": "A city"}
    reason = refusal(dumping, {"messages": [ASKED | {"content": [{"type": "text", "text": "Rome?"}, image]}, SAID]})
    assert reason.startswith("the chat template does not read the content of messages[0]")


@pytest.mark.parametrize(
    "content", [["It", "is hot"], {"text": "It is hot"}, [{"type": "thinking", "thinking": "Hot"}]]
)
def test_what_a_template_would_write_as_python_does_is_refused(content: Any):
    chatml = with_template(TOKENIZER, TEMPLATES["chatml"])
    reason = refusal(chatml, {"messages": [ASKED, SAID | {"content": content}]})
    assert reason.startswith(
        f"the chat template does not read the content of messages[1], but writes {content}. Valid: "
    )


def test_contents_that_a_template_writes_in_json_are_taken():
    tojson = "{{ message['content'] | tojson if message['role'] == 'tool' else message['content'] }}"
    chatml = with_template(TOKENIZER, TEMPLATES["chatml"].replace("{{ message['content'] }}", tojson))
    contents: tuple[Any, ...] = ({"city": "Rome"}, ["Rome"])
    for content in contents:
        answer = {"role": "tool", "content": content}
        tokenised = document(chatml, {"messages": [ASKED, answer, SAID]}, train_on="all")
        assert json.dumps(content) in TOKENIZER.decode(tokenised.input_ids)
    unread = with_template(TOKENIZER, TOOLS)  # looks for parts in a mapping, and finds keys
    reason = refusal(unread, {"messages": [ASKED, SAID | {"content": {"text": "It is hot"}}, ASKED, SAID]})
    assert reason.startswith("the chat template does not write the content of messages[1]")


def test_a_list_of_nothing_is_no_text():
    chatml = with_template(TOKENIZER, TEMPLATES["chatml"])
    tokenised = [document(chatml, {"messages": [ASKED | {"content": content}, SAID]}) for content in ([], "")]
    assert tokenised[0].input_ids.tolist() == tokenised[1].input_ids.tolist()


def test_a_template_may_write_arguments_as_a_text_in_json():
    written = "{{ call['function'] | tojson }}"
    openais = TOOLS.replace(written, "{{ call.function.name ~ (call.function.arguments | tojson | tojson) }}")
    tokenised = document(with_template(TOKENIZER, openais), {"messages": [ASKED, calling(call())]}, train_on="all")
    assert json.dumps(json.dumps(ARGUMENTS)) in TOKENIZER.decode(tokenised.input_ids)


class Text(str):
    """A rendered text that counts how often it is searched whole."""

    searches = 0

    def __contains__(self, part: Any) -> bool:
        Text.searches += 1
        return super().__contains__(part)


def test_a_text_is_searched_as_often_for_many_messages_as_for_few():
    def render(conversation: Conversation) -> str:
        Text.searches += 1
        written = [
            json.dumps(message.get("tool_calls")) + "".join(part["text"] for part in message["content"])
            for message in conversation.messages
        ]
        return Text("\n".join(written))

    searches = list[int]()
    for count in (2, 400):
        turn = calling(call()) | {"content": [{"type": "text", "text": "word"}] * 2}
        conversation = Conversation([turn] * count)
        Text.searches = 0
        assert readable(conversation, render) == conversation
        refuse_unwritten(conversation, render, "")
        searches.append(Text.searches)
    assert searches[0] == searches[1]


def test_what_is_null_in_json_text_is_written_as_transformers_writes_it():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"default": None}}}}]
    for given, expected in ((json.dumps(tools), tools), (tools, [call_without_default()])):
        tokenised = document(TOKENIZER, {"messages": [ASKED, SAID], "tools": given}, train_on="all")
        assert tokenised.input_ids.tolist() == ids([ASKED, SAID], tools=expected)


def call_without_default() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": {"city": {}}}}


def test_rows_of_a_run_from_before_are_prepared_again_as_they_were(tmp_path: Path):
    # In version 1 a conversation went to the template as it was, without documents, and with nothing that is null.
    writing = with_template(TOKENIZER, "{% if documents %}documents{% endif %}" + TOOLS)
    messages = [
        ASKED | {"content": [{"type": "text", "text": "Rome?"}, {"type": "image", "text": ""}]},
        calling(call(json.dumps(ARGUMENTS))),
        {"role": "tool", "content": "hot", "tool_call_id": "c2"},
        SAID | {"weight": 0},
    ]
    tools = json.dumps([{**call_without_default(), "strict": None}])
    others = {"documents": [{"title": "a", "text": "b"}], "images": ["cat.png"], "system": "Be short."}
    row = {"messages": messages, "tools": tools, **others, "chat_template_kwargs": {"unread": 1}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    before = Tokenisation(writing, train_on="all", version=1)
    folder = prepare([Part(Source(str(tmp_path / "rows.jsonl")), before)], tmp_path / "cache", workers=1)
    [prepared] = load_prepared(folder).to_list()
    assert prepared["input_ids"] == ids(messages, tools=[call_without_default()])
    (now,) = Tokenisation(writing, train_on="all")([row])
    assert isinstance(now, str)
    tokens = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "pixel_values": [0.5]}
    (packed,) = Tokenisation(None, "tokens", version=1)([tokens])
    assert isinstance(packed, Document)
    assert packed.input_ids.tolist() == tokens["input_ids"]
