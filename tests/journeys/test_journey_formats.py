"""Someone who brings ShareGPT, Alpaca, or columns of another name: as typed, and what is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli import main
from hf_longctx.data.formats import RowFormat
from hf_longctx.data.prepared import load_prepared
from hf_longctx.data.tokenisation import Tokenisation
from tests.builders.chat_templates import CHATML, tokenizers, with_template
from tests.builders.tiny_models import tiny_llama

OWN = tokenizers()["own"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What is 2 + 2?"},
        {"from": "gpt", "value": "4"},
    ]
}
ALPACA = {"system": "Be brief.", "instruction": "What is", "input": "2 + 2?", "output": "4"}
ELSEWHERE = {"dialog": [{"speaker": "setup", "says": "Be brief."}, {"speaker": "customer", "says": "What is 2 + 2?"}]}
ELSEWHERE["dialog"].append({"speaker": "agent", "says": "4"})
NAMED = [
    "data.columns={messages: dialog, role: speaker, content: says}",
    "data.roles={setup: system, customer: user, agent: assistant}",
]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `prepare` on rows: its exit code, what it said, and the documents."""
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    with_template(OWN, CHATML).save_pretrained(tmp_path / "model")
    tiny_llama().config.save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path / 'model'}}}\ndata: {{path: {tmp_path / 'rows.jsonl'}}}\nlongctx: {{capacity: 256}}\n"
    )

    def run(rows: list[dict[str, Any]], *overrides: str) -> tuple[int, str, Any]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = tmp_path / f"prepared-{len(list(tmp_path.iterdir()))}"
        code = main(["prepare", str(tmp_path / "run.yaml"), *overrides, "--output", str(output)])
        shown = capsys.readouterr()
        documents = load_prepared(output / "train")[:] if code == 0 else None
        return code, shown.out + shown.err, documents

    return run


def test_sharegpt_and_columns_of_any_name_become_the_same_documents_as_messages(prepare: Any):
    _, _, expected = prepare([{"messages": CHAT}])
    assert prepare([SHAREGPT])[2] == expected
    assert prepare([ELSEWHERE], *NAMED)[2] == expected
    apart = {"system": "Be brief.", "conversations": SHAREGPT["conversations"][1:]}
    assert prepare([apart])[2] == expected


def test_alpaca_is_a_conversation_of_instruction_and_input(prepare: Any):
    turns = [CHAT[0], {"role": "user", "content": "What is\n2 + 2?"}, CHAT[2]]
    assert prepare([ALPACA])[2] == prepare([{"messages": turns}])[2]
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with_history = ALPACA | {"input": "", "history": [["Hi", "Hello"]]}
    turns = [CHAT[0], *before, {"role": "user", "content": "What is"}, CHAT[2]]
    assert prepare([with_history])[2] == prepare([{"messages": turns}])[2]


def test_columns_of_questions_and_texts_are_named(prepare: Any):
    expected = prepare([{"prompt": "Q", "completion": " A"}])[2]
    assert (
        prepare([{"question": "Q", "answer": " A"}], "data.columns={prompt: question, completion: answer}")[2]
        == expected
    )
    assert prepare([{"body": "words"}], "data.columns={text: body}")[2] == prepare([{"text": "words"}])[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "Q", "answer": "A"},
            "it looks like questions and answers: columns {prompt: question, completion: answer}",
        ),
        ({"dialog": [], "id": 1}, "it looks like conversations: columns {messages: dialog}"),
        ({"prompt": "P", "chosen": "good", "rejected": "bad"}, "It belongs to TRL's DPOTrainer or KTOTrainer"),
        ({"prompt": "P", "completion": "C", "label": False}, "column 'label' says whether the completion is wanted"),
        ({"prompt": "P", "completion": "C", "label": "False"}, "column 'label' says whether the completion is wanted"),
        (SHAREGPT | {"kto_tag": False}, "column 'kto_tag' says whether the answer is wanted"),
        (ALPACA | {"kto_tag": "true"}, "column 'kto_tag' says whether the answer is wanted"),
        (SHAREGPT | {"images": ["cat.png"]}, "column 'images' holds"),
        (
            {"conversations": [{"from": "customer", "value": "Hi"}]},
            "data.roles, which says what it is: {customer: user}",
        ),
        (ALPACA | {"history": ["one"]}, "a list of pairs of an instruction and its output"),
    ],
)
def test_a_fault_of_the_columns_is_said_once_for_a_file_with_what_it_looks_like(
    prepare: Any, row: dict[str, Any], message: str
):
    code, shown, _ = prepare([row] * 30)
    assert code == 2
    assert shown.count(message) == 1, shown
    assert "rows.jsonl, line 1 and 29 more rows like it: " in shown


def test_names_that_nothing_is_read_from_are_refused_with_those_that_there_are(prepare: Any):
    code, shown, _ = prepare([ELSEWHERE], "data.columns={message: dialog}", "data.roles={agent: robot}")
    assert code == 2
    assert "data.columns: 'message' is nothing that is read; valid on the left: input_ids" in shown
    assert "data.roles: 'agent': 'robot' is no role; valid on the right: system, user, assistant" in shown


def test_calls_and_answers_of_sharegpt_are_those_of_chat_templates():
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = with_template(OWN, template)
    (document,) = Tokenisation(tokenizer)([{"conversations": turns}])
    assert not isinstance(document, str), document
    text = tokenizer.decode(document.input_ids)
    assert text == '<user>Weather?</s><assistant>weather({"city": "Oslo"})</s><tool>rain</s><assistant>Rain.</s>'
    (refused,) = Tokenisation(tokenizer)([{"conversations": [{"from": "function_call", "value": "weather"}]}])
    assert "a function_call holds 'weather'" in str(refused)


def test_a_source_without_other_names_keeps_its_cache():
    assert Tokenisation(OWN).fingerprint == Tokenisation(OWN, format=RowFormat({}, {})).fingerprint
    assert Tokenisation(OWN).fingerprint != Tokenisation(OWN, format=RowFormat({"text": "body"})).fingerprint
