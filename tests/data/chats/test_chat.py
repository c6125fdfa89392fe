"""Conversations: the ids that transformers gives, and labels on what the assistant writes and nothing else."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import ByteLevel
from transformers.utils.chat_template_utils import render_jinja_template

from hf_longctx.data.chats import chat
from hf_longctx.data.chats.chat import ChatTemplate
from hf_longctx.data.chats.conversation import EMPTY
from hf_longctx.data.tokenisation import Document, Tokenisation
from tests.builders.chat_templates import CHATML, ENDS, QWEN3, with_template
from tests.builders.tokenised_rows import TOKENIZERS, contents, document, learned, refusal

Messages = list[dict[str, Any]]


@st.composite
def conversations(draw: st.DrawFn, system: bool = True) -> Messages:
    messages = [{"role": "system", "content": draw(contents)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4) | st.integers(5, 9))):
        messages += [{"role": role, "content": draw(contents)} for role in ("user", "assistant")]
    return messages


@given(data=st.data(), train_on=st.sampled_from(["assistant", "all"]))
@pytest.mark.parametrize("name", [*ENDS, "generation", "tools"])
def test_ids_are_those_of_apply_chat_template(name: str, data: st.DataObject, train_on: str):
    tokenizer = TOKENIZERS[name]
    rows = [
        {"messages": messages}
        for messages in data.draw(st.lists(conversations(name != "mistral"), min_size=1, max_size=3))
    ]
    for row, result in zip(rows, Tokenisation(tokenizer, train_on=train_on)(rows), strict=True):
        assert isinstance(result, Document)
        assert result.input_ids.dtype == np.int32
        assert result.input_ids.tolist() == tokenizer.apply_chat_template(row["messages"])["input_ids"]
        assert (result.labels is None) == (train_on == "all")


@given(data=st.data())
@pytest.mark.parametrize("name", ENDS)
def test_learned_is_what_the_assistant_writes_and_the_end_of_its_turn(name: str, data: st.DataObject):
    """White space at the beginning of an answer may share a token with the header: see the next test."""
    tokenizer = TOKENIZERS[name]
    messages = data.draw(conversations(name != "mistral"))
    for message in messages:
        message["content"] = message["content"].strip() if name == "llama3" else message["content"].lstrip()
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    texts = learned(tokenizer, document(tokenizer, {"messages": messages}))
    assert texts == [answer + ENDS[name] for answer in answers]


def test_a_token_is_learned_if_one_of_its_characters_is():
    """SmolLM2 makes one token of the header's line break and the first two of the answer."""
    tokenizer = TOKENIZERS["chatml"]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\n\nYes"}]
    assert learned(tokenizer, document(tokenizer, {"messages": messages})) == ["\n" + "\n\n\nYes<|im_end|>\n"]


def agent(questions: int, steps: int) -> Messages:
    """Answers to each question after some calls of a tool."""
    messages = [{"role": "system", "content": "Be short."}]
    for question in range(questions):
        messages += [{"role": "user", "content": f"Where is {question}?"}]
        messages += [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": "Found."}] * steps
        messages += [{"role": "assistant", "content": "There."}]
    return messages


@pytest.mark.parametrize(
    "change",
    [
        ("", ""),
        # What a window would show otherwise, or not at all.
        ("{{ '<|im_start|>' + m", "{{ (loop.index if message['role'] == 'user' else '') ~ '<|im_start|>' + m"),
        ("{{ '<|im_start|>' + m", "{{ (messages[0]['content'] if loop.index == 10 else '') + '<|im_start|>' + m"),
        ("{% for", "{% if messages[1]['content'] != 'Where is 0?' %}{{ raise_exception('No') }}{% endif %}{% for"),
        # What beginnings do not show either.
        ("message['content'] +", "('' if loop.last else 'not last ') + message['content'] +"),
    ],
)
@pytest.mark.parametrize("messages", [agent(9, 0), agent(1, 9), agent(3, 2)])
def test_answers_are_found_in_long_conversations_of_any_template(messages: Messages, change: tuple[str, str]):
    """Whether or not a few messages before them are enough to render them."""
    tokenizer = with_template(TOKENIZERS["chatml"], CHATML.replace(*change))
    if "loop.last" in change[1]:
        assert "does not show which characters" in refusal(tokenizer, {"messages": messages})
        return
    texts = learned(tokenizer, document(tokenizer, {"messages": messages}))
    assert texts == [message["content"] + ENDS["chatml"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("name", ["own", "mistral"])
def test_what_is_rendered_grows_with_the_messages_and_not_with_their_square(name: str, monkeypatch: pytest.MonkeyPatch):
    rendered = []

    def counting(conversations: list[Messages], **settings: Any) -> Any:
        rendered.append(sum(map(len, conversations)))
        return render_jinja_template(conversations, **settings)

    monkeypatch.setattr(chat, "render_jinja_template", counting)
    turns = [{"role": role, "content": "Word"} for role in ("user", "assistant")]
    document(TOKENIZERS[name], {"messages": turns * 100})
    assert sum(rendered) < 11 * 200


@given(messages=conversations())
def test_with_generation_tags_labels_are_the_mask_of_transformers(messages: Messages):
    tokenizer = TOKENIZERS["generation"]
    tokenised = document(tokenizer, {"messages": messages})
    assert tokenised.labels is not None
    mask = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)["assistant_masks"]
    np.testing.assert_array_equal(tokenised.labels != -100, np.array(mask, bool))


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("answer", ["Hello", "Hello ", " ", "Hello  ", "so 👩‍👩‍👧", "汉", "two\n"])
@pytest.mark.parametrize("first", ["user", "assistant"])
def test_the_mask_is_right_where_that_of_transformers_is_not(first: str, answer: str, trim_offsets: bool):
    """A span that ends at token 0, in the first of several tokens of a letter, or in a space that offsets leave out."""
    tokenizer = with_template(TOKENIZERS["content"], TOKENIZERS["content"].chat_template)
    tokenizer.backend_tokenizer.post_processor = ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why"}]
    turns = turns if first == "assistant" else turns[::-1]
    turns += [{"role": "user", "content": "Then"}, {"role": "assistant", "content": answer}]
    tokenised = document(tokenizer, {"messages": turns})
    assert learned(tokenizer, tokenised) == [answer, answer]


def test_a_template_that_refuses_is_quoted():
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    reason = refusal(TOKENIZERS["mistral"], {"messages": messages})
    assert "the chat template cannot render it: TemplateError: Conversation roles must alternate" in reason
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant"}]
    assert "UndefinedError: 'dict object' has no attribute 'content'" in refusal(
        TOKENIZERS["chatml"], {"messages": messages}
    )
    messages = [{"role": "user", "content": ["Hi"]}, {"role": "assistant", "content": "Yes"}]
    assert "the chat template cannot render it: TypeError: can only" in refusal(
        TOKENIZERS["chatml"], {"messages": messages}
    )


def test_a_template_that_drops_earlier_reasoning_is_never_guessed_at():
    tokenizer = TOKENIZERS["qwen3"]
    one = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "Sum."}]
    two = [{"role": "user", "content": "And 3?"}, {"role": "assistant", "content": "7", "reasoning_content": "More."}]
    last = "<think>\nMore.\n</think>\n\n7<|im_end|>\n"
    assert learned(tokenizer, document(tokenizer, {"messages": two})) == [last]
    reason = refusal(tokenizer, {"messages": one + two})
    assert (
        "the first 2 of 4 messages, rendered alone or up to the header of the last of them, are not how the conversation begins"
        in reason
    )
    assert "Valid: a template with {% generation %}" in reason
    # What it says is valid is.
    assert document(tokenizer, {"messages": one + two}, train_on="all").labels is None
    row = {"prompt": one + two[:1], "completion": two[1:]}
    tokenised = document(tokenizer, row)
    assert learned(tokenizer, tokenised) == [last]
    assert tokenised.input_ids.tolist() == tokenizer.apply_chat_template(one + two)["input_ids"]
    marked = QWEN3.replace(
        "{{- message.content + '<|im_end|>\n' }}",
        """\
{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}\
{%- else %}{{- message.content + '<|im_end|>\n' }}{%- endif %}""",
    )
    assert learned(tokenizer, document(with_template(tokenizer, marked), {"messages": one + two})) == [
        "4<|im_end|>",
        "7<|im_end|>",
    ]


@given(prompt=conversations(), completion=conversations(system=False))
@pytest.mark.parametrize("name", ["own", "generation"])
def test_of_a_prompt_and_a_completion_of_messages_only_the_completion_is_learned(
    name: str, prompt: Messages, completion: Messages
):
    tokenizer = TOKENIZERS[name]
    completion = completion[1:]
    prompt = [*prompt, {"role": "user", "content": "Now?"}]
    together = document(tokenizer, {"messages": prompt + completion})
    tokenised = document(tokenizer, {"prompt": prompt, "completion": completion})
    np.testing.assert_array_equal(tokenised.input_ids, together.input_ids)
    assert tokenised.labels is not None
    assert together.labels is not None
    start = len(tokenizer.apply_chat_template(prompt)["input_ids"])
    assert (tokenised.labels[:start] == -100).all()
    np.testing.assert_array_equal(tokenised.labels[start:], together.labels[start:])


def test_what_arrow_fills_in_is_taken_out():
    # In a column of structs every row has the keys of all rows.
    tokenizer = TOKENIZERS["tools"]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}]
    clean = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    filled = [
        {
            "role": "user",
            "content": [{"type": "text", "text": text, "image": None} for text in ("1+1", "?")],
            "tool_calls": None,
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": None}}, "id": None}],
        },
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "content": "It is 2", "tool_calls": None},
    ]
    filled_tools = [{**tools[0], "strict": None}]
    expected = tokenizer.apply_chat_template(clean, tools=tools, thinking=True)["input_ids"]
    for given_tools in (filled_tools, tools, json.dumps(tools)):
        row = {"messages": filled, "tools": given_tools, "chat_template_kwargs": {"thinking": True, "other": None}}
        tokenised = document(tokenizer, row)
        assert tokenised.input_ids.tolist() == expected
        assert learned(tokenizer, tokenised) == [
            '{"name": "add", "arguments": {"a": 1}}/think<|im_end|>\n',
            "It is 2/think<|im_end|>\n",
        ]
    plain = document(tokenizer, {"messages": filled, "tools": None, "chat_template_kwargs": None})
    assert plain.input_ids.tolist() == tokenizer.apply_chat_template(clean)["input_ids"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": None},
            r"column 'messages' holds None; valid: a list of messages, each with a role and a content",
        ),
        ({"messages": "Hi"}, r"column 'messages' holds 'Hi' (str); valid: a list of messages"),
        ({"messages": []}, EMPTY + "no message in 'messages'"),
        ({"messages": ["Hi"]}, "messages[0] is 'Hi' (str); valid: a mapping with a role and a content"),
        ({"messages": [{"content": "Hi"}]}, "the role of messages[0] is None; valid: a string"),
        ({"messages": [{"role": 3}]}, "the role of messages[0] is 3 (int); valid: a string"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, EMPTY + "none of its"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "a message holds a character that is not Unicode"),
        ({"messages": [{"role": "user"}], "tools": 3}, "column 'tools' holds 3 (int); valid: a list of JSON schemas"),
        ({"messages": [{"role": "user"}], "tools": "{"}, "column 'tools' holds text that is no JSON"),
        (
            {"messages": [{"role": "user"}], "tools": ["f"]},
            "tools[0] is 'f' (str); valid: a list of JSON schemas, each a",
        ),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": []}, "column 'chat_template_kwargs' holds [] (list)"),
        (
            {"messages": [{"role": "user"}], "chat_template_kwargs": {"chat_template": "x"}},
            "got multiple values for keyword argument 'chat_template'",
        ),
        ({"prompt": [{"role": "user", "content": "Hi"}], "completion": "Yes"}, "column 'prompt' holds [{"),
        ({"prompt": [], "completion": []}, EMPTY + "no message in 'prompt' and 'completion'"),
    ],
)
def test_bad_rows_are_refused_with_what_was_found_and_what_is_valid(row: dict[str, Any], reason: str):
    assert reason in refusal(TOKENIZERS["chatml"], row)


@pytest.mark.parametrize("template", [None, "{% for %}", {"tool_use": CHATML}])
def test_without_a_template_that_can_be_used_the_error_says_what_is_valid(template: Any):
    tokenizer = with_template(TOKENIZERS["own"], template)
    row = {"messages": [{"role": "user", "content": "Hi"}]}
    message = r"messages need a chat template.* Valid: .* tokenizer\.chat_template, or .* \(kind='text'\)"
    with pytest.raises(ValueError, match=message):
        Tokenisation(tokenizer, "messages")
    with pytest.raises(ValueError, match=message):
        Tokenisation(tokenizer).kind_of(row)
    with pytest.raises(ValueError, match=message):
        Tokenisation(tokenizer)([row])
    with pytest.raises(ValueError, match=message):
        Tokenisation(tokenizer)([{"prompt": row["messages"], "completion": row["messages"]}])
    with pytest.raises(ValueError, match=message):
        ChatTemplate(tokenizer)
