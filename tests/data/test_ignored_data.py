"""What a row holds and training would not use is refused: keys that a chat template leaves out, images, and rows that are
several documents. Templates are those of models, as TRL ships them."""

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import trl
from datasets import Dataset, Features, Image, IterableDataset, List, Value

from hf_longctx import LongContextPlugin
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.prepare import Part, PrepareError, prepare
from hf_longctx.data.prepared import REFUSED, load_prepared
from hf_longctx.data.reading.source import Source
from hf_longctx.data.tokenisation import Tokenisation
from hf_longctx.inference.evaluation.losses import as_documents
from hf_longctx.run_documents import load_split
from hf_longctx.settings import DataConfig
from tests.builders.chat_templates import TOOLS, tokenizers
from tests.builders.tiny_models import tiny_llama
from tests.builders.tokenised_rows import document, learned, refusal
from tests.builders.training.sft_runs import sft_trainer
from tests.builders.training_runs import RecordingTrainer, arguments, fresh_accelerator_state

SMOLLM2 = tokenizers()["own"]
SHIPPED = Path(trl.__file__).parent / "chat_templates"
PICTURE = PIL.Image.new("RGB", (2, 2))

ASKED = {"role": "user", "content": "Rome?"}
SAID = {"role": "assistant", "content": "It is hot"}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": {}}}
FOUND = {"role": "tool", "content": "hot", "tool_call_id": "c1", "name": "weather"}


@lru_cache
def template(name: str) -> Any:
    """SmolLM2's tokenizer with a model's template."""
    if name == "own":
        return SMOLLM2
    tokenizer = copy.copy(SMOLLM2)
    tokenizer.chat_template = TOOLS if name == "tools" else (SHIPPED / f"{name}.jinja").read_text()
    return tokenizer


def calling(*calls: Any, content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def renamed(**function: Any) -> dict[str, Any]:
    return {**CALL, "id": "c2", "function": {**CALL["function"], **function}}


# Keys of messages


@pytest.mark.parametrize(
    ("name", "row", "what"),
    [
        (
            "own",
            {"messages": [ASKED, calling(CALL)], "tools": [TOOL]},
            "messages[1].tool_calls[0] (function 'weather')",
        ),
        ("own", {"messages": [ASKED, SAID], "tools": [TOOL]}, "the column 'tools'"),
        ("own", {"messages": [ASKED, SAID], "documents": [{"title": "a", "text": "b"}]}, "the column 'documents'"),
        ("own", {"messages": [ASKED, SAID | {"reasoning": "July"}]}, "the key 'reasoning' of messages[1]"),
        ("own", {"messages": [ASKED | {"name": "Ada"}, SAID]}, "the key 'name' of messages[0]"),
        ("own", {"messages": [ASKED, SAID | {"weight": 0}]}, "the key 'weight' of messages[1]"),
        ("own", {"prompt": [ASKED], "completion": [calling(CALL)]}, "messages[1].tool_calls[0]"),
        # A tool's answer needs no name only where the order says which call it answers.
        ("tools", {"messages": [ASKED, FOUND, SAID]}, "the key 'tool_call_id' of messages[1]"),
        (
            "tools",
            {"messages": [ASKED, calling(CALL, renamed()), FOUND | {"tool_call_id": "c2"}, FOUND, SAID]},
            "the key 'tool_call_id' of messages[2] (and of 1 more)",
        ),
        ("deepseekv3", {"messages": [ASKED, calling(CALL)], "tools": [TOOL]}, "the column 'tools'"),
        ("llama3_1", {"messages": [ASKED, calling(CALL, content="Let me look")]}, "the content of messages[1] beside"),
        (
            "gptoss",
            {"messages": [ASKED, calling(CALL, renamed(name="wind"))]},
            "messages[1].tool_calls[1] (function 'wind')",
        ),
        (
            "gemma3",
            {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            "messages[1].tool",
        ),
        ("smolvlm", {"messages": [ASKED, SAID]}, "contents that are strings"),
    ],
)
def test_what_a_template_leaves_out_is_refused(name: str, row: dict[str, Any], what: str):
    reason = refusal(template(name), row, train_on="all")
    assert reason.startswith(f"the chat template does not write {what}")
    assert "Valid: " in reason


def test_columns_and_variables_that_are_not_read_are_refused():
    rows: list[dict[str, Any]] = [
        {"messages": [ASKED, SAID], "system": "Be short."},
        {"messages": [ASKED, SAID], "functions": [{"name": "weather"}]},
        {"messages": [ASKED, SAID], "chat_template_kwargs": {"enable_thinking": False}},
    ]
    reasons = [refusal(SMOLLM2, row) for row in rows]
    assert "column 'system' holds 'Be short.' (str), and is not read. Valid: a first message" in reasons[0]
    assert "column 'functions' holds [{" in reasons[1]
    assert "reads no variable 'enable_thinking'" in reasons[2]
    said_twice = [{"role": "system", "content": "Be short."}, ASKED, SAID]
    assert document(SMOLLM2, {"messages": said_twice, "system": "Be short.", "functions": [], "tools": None})


@pytest.mark.parametrize("name", ["tools", "qwen3", "llama3_1", "gptoss", "glm4moe"])
def test_an_agents_row_is_taken_as_transformers_renders_it(name: str):
    tokenizer = template(name)
    messages = [ASKED, calling(CALL), FOUND, SAID]
    tokenised = document(tokenizer, {"messages": messages, "tools": json.dumps([TOOL])}, train_on="all")
    assert tokenised.input_ids.tolist() == tokenizer.apply_chat_template(messages, tools=[TOOL])["input_ids"]


@pytest.mark.parametrize("name", ["tools", "qwen3", "llama3_1", "gemma4", "deepseekv3"])
def test_arguments_may_be_a_mapping_or_json_text(name: str):
    """Templates would quote text, put braces around it, or fail on a mapping."""
    tokenizer = template(name)
    as_text = renamed(arguments=json.dumps(CALL["function"]["arguments"]))
    texts = [
        tokenizer.decode(document(tokenizer, {"messages": [ASKED, calling(call)]}, train_on="all").input_ids)
        for call in (renamed(), as_text)
    ]
    assert texts[0] == texts[1]
    assert any(form in texts[0] for form in ('{"city": "Rome"}', '{city:<|"|>Rome<|"|>}'))
    assert "{{" not in texts[0]


def test_contents_that_are_lists_of_texts_are_written_under_any_template():
    parts = [{"type": "text", "text": "Ro"}, {"type": "text", "text": "me?"}]
    for name in ("own", "tools", "qwen3", "gemma3"):
        tokenizer = template(name)
        plain = document(tokenizer, {"messages": [ASKED, SAID]})
        of_parts = document(tokenizer, {"messages": [ASKED | {"content": parts}, SAID]})
        np.testing.assert_array_equal(of_parts.input_ids, plain.input_ids)
        np.testing.assert_array_equal(of_parts.labels, plain.labels)
        assert "It is hot" in learned(tokenizer, of_parts)[0]
    other = [*parts, {"type": "thinking", "thinking": "A city"}]
    assert "the parts of messages[0] that are no text" in refusal(
        template("tools"), {"messages": [ASKED | {"content": other}, SAID]}
    )


def test_refused_rows_are_named_counted_and_listed(tmp_path: Path):
    file = tmp_path / "chat.jsonl"
    rows: list[dict[str, Any]] = [{"messages": [ASKED, SAID]}, {"messages": [ASKED, calling(CALL)], "tools": [TOOL]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = Part(Source(str(file)), Tokenisation(SMOLLM2))
    with pytest.raises(
        PrepareError, match=r"chat.jsonl, line 2: the chat template does not write messages\[1\].tool_calls"
    ):
        prepare([part], tmp_path / "cache", workers=1)
    folder = prepare([part], tmp_path / "cache", workers=1, bad_rows="skip")
    [counts] = load_prepared(folder).manifest.sources
    assert (counts.documents, counts.bad_rows) == (1, 1)
    assert "'weather'" in (folder / REFUSED).read_text()


# Rows that are several documents


TOKENS = [5, 6, 7, 8, 9, 4]
PACKED: list[tuple[str, Any]] = [
    ("position_ids", [0, 1, 2, 0, 1, 2]),
    ("position_ids", [[0, 1, 2, 0, 1, 2]]),
    ("seq_lengths", [3, 3]),
    ("cu_seqlens", [0, 3, 6]),
    ("cu_seq_lens_q", [0, 3, 6]),
    ("segment_ids", [1, 1, 1, 2, 2, 2]),
    ("document_ids", [0, 0, 0, 1, 1, 1]),
    ("seq_idx", [[0, 0, 0, 1, 1, 1]]),
    ("attention_mask", [1, 1, 1, 2, 2, 2]),
]
WHOLE: list[tuple[str, Any]] = [
    ("position_ids", [0, 1, 2, 3, 4, 5]),
    ("position_ids", [[0, 1, 2, 3, 4, 5]] * 3),
    ("seq_lengths", [6]),
    ("cu_seqlens", [0, 6]),
    ("segment_ids", [3] * 6),
    ("document_ids", [17, 4]),
    ("attention_mask", [1] * 6),
    ("position_ids", None),
]
UNREADABLE: list[tuple[str, Any, str]] = [
    ("position_ids", [2, 3, 4, 5, 6, 7], "holds the position 2 at token 0, other positions than 0, 1, 2"),
    ("position_ids", [0, 1, 2], "holds 3 positions, of 6 tokens"),
    ("seq_lengths", [4], "holds lengths that add up to 4, of 6 tokens"),
    ("cu_seqlens", [0, 5], "holds bounds from 0 to 5, of 6 tokens"),
    ("attention_mask", [[1, 0], [1, 1]], "has the shape [2, 2], and is not read"),
]


@pytest.mark.parametrize(("name", "values"), PACKED)
def test_a_row_that_is_several_documents_is_refused_wherever_it_comes_in(name: str, values: Any):
    packed, whole = (
        {"input_ids": TOKENS, "labels": TOKENS, name: values},
        {"input_ids": TOKENS, "labels": TOKENS, name: None},
    )
    message = f"column '{name}' says that its 6 tokens are 2 documents, .* before token 3 "
    assert np.all([word in refusal(SMOLLM2, packed) for word in (f"column {name!r}", "before token 3 ")])
    table = Dataset.from_list([whole, packed])
    for dataset in ([whole, packed], table, table.with_transform(lambda batch: batch)):
        with pytest.raises(ValueError, match=f"(row|document) 1: {message}"):
            LengthIndex.from_dataset(dataset)
    with pytest.raises(ValueError, match=f"row 0: {message}"):
        LengthIndex.from_dataset(table.select([1]))
    with pytest.raises(ValueError, match=f"document 1: {message}"):
        as_documents(table)
    assert LengthIndex.from_dataset(table.select([0])).lengths.tolist() == [6]


@pytest.mark.parametrize(("name", "values"), WHOLE)
def test_a_row_that_is_one_document_is_taken_whatever_says_so(name: str, values: Any):
    row = {"input_ids": TOKENS, name: values}
    assert document(SMOLLM2, row).input_ids.tolist() == TOKENS
    for dataset in ([row], Dataset.from_list([row, row])):
        assert LengthIndex.from_dataset(dataset).lengths.tolist() == [6] * len(dataset)


@pytest.mark.parametrize(("name", "values", "message"), UNREADABLE)
def test_a_column_that_says_neither_is_refused(name: str, values: Any, message: str):
    row = {"input_ids": TOKENS, "labels": TOKENS, name: values}
    assert f"column {name!r} {message}" in refusal(SMOLLM2, row)
    if name != "seq_lengths" and name != "cu_seqlens":
        with pytest.raises(ValueError, match="row 0: column"):
            LengthIndex.from_dataset(Dataset.from_list([row]))


def test_trainers_and_configurations_refuse_packed_rows(tmp_path: Path):
    """A folder that a configuration names is used where it lies; TRL's trainer keeps the columns of what was packed before."""
    dataset = Dataset.from_list([{"input_ids": TOKENS, "labels": TOKENS, "seq_lengths": [2, 4]}] * 4)
    dataset.save_to_disk(tmp_path / "saved")
    loaded = load_split(DataConfig(path=str(tmp_path / "saved")), "train", None)
    fresh_accelerator_state()
    plugin = LongContextPlugin(capacity=64, global_batch_documents=2)
    ours = RecordingTrainer(model=tiny_llama(), args=arguments(tmp_path), train_dataset=loaded, plugin=plugin)
    trls = sft_trainer(tmp_path, train_dataset=dataset, padding_free=True, assistant_only_loss=False)
    for trainer in (ours, trls):
        with pytest.raises(ValueError, match="row 0: column 'seq_lengths' says that its 6 tokens are 2 documents"):
            trainer.training_steps()


def test_what_the_documentation_cuts_packed_rows_with_cuts_them():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    [_, block] = page.split("## Rows that are packed already")
    names: dict[str, Any] = {
        "dataset": Dataset.from_list(
            [
                {"input_ids": TOKENS, "labels": TOKENS, "position_ids": [0, 1, 2, 0, 1, 2]},
                {"input_ids": [3, 3]} | {"labels": [-100, 3], "position_ids": [0, 1]},
            ]
        )
    }
    exec(block.split("```python")[1].split("```")[0], names)
    assert names["dataset"].to_list() == [
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
        {"input_ids": [8, 9, 4], "labels": [8, 9, 4]},
        {"input_ids": [3, 3], "labels": [-100, 3]},
    ]
    assert LengthIndex.from_dataset(names["dataset"]).lengths.tolist() == [3, 3, 2]


# Images, sound and video


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a cat on a mat", "image": PICTURE},
        {"text": "a cat on a mat", "photos": [PICTURE]},
        {"text": "a cat on a mat", "images": ["cat.png"]},
        {"input_ids": [1, 2, 3], "pixel_values": np.zeros((3, 2, 2))},
        {"messages": [ASKED, SAID], "anything": {"bytes": b"abc", "path": None}},
        {"prompt": "a", "completion": "b", "audio": {"array": [0.5], "sampling_rate": 8}},
    ],
)
def test_a_row_with_an_image_is_refused(row: dict[str, Any]):
    assert f"column {list(row)[-1]!r} holds " in refusal(SMOLLM2, row)
    without = {**row, list(row)[-1]: None}
    assert len(document(SMOLLM2, without).input_ids) > 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "cat.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"video": "cat.mp4"},
        PICTURE,
    ],
)
def test_a_message_with_an_image_is_refused(part: Any):
    asked = {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}
    reason = refusal(SMOLLM2, {"messages": [asked, SAID]})
    assert "the content of messages[0] holds part 1" in reason
    assert "only text is trained on. Valid: parts of text" in reason


def test_data_sets_with_images_are_refused_with_file_and_row(tmp_path: Path):
    features = Features({"text": Value("string"), "input_ids": List(Value("int32")), "photo": Image()})
    rows = {"text": ["one two", "a cat"], "input_ids": [[1, 2], [3, 4]], "photo": [None, PICTURE]}
    dataset = Dataset.from_dict(rows, features=features)
    dataset.to_parquet(str(tmp_path / "cats.parquet"))
    stream: IterableDataset = dataset.to_iterable_dataset()
    tokenisation = Tokenisation(None, "tokens")
    for path, name in (
        (str(tmp_path / "cats.parquet"), "cats.parquet"),
        (dataset, "Dataset"),
        (stream, "IterableDataset"),
    ):
        with pytest.raises(PrepareError, match=f"{name}, row 2: column 'photo' holds .* only text is trained on"):
            prepare([Part(Source(path), tokenisation)], tmp_path / "cache", workers=1)
    with pytest.raises(ValueError, match="row 1 has 'photo', a column of Image, and only text is trained on"):
        LengthIndex.from_dataset(dataset)
    with pytest.raises(ValueError, match="document 1 has 'photo', and only text"):
        LengthIndex.from_dataset([dataset[0], dataset[1]])
    assert LengthIndex.from_dataset(dataset.select([0])).lengths.tolist() == [2]


IMAGE = {"bytes": b"abc", "path": None}


@pytest.mark.parametrize(
    "columns",
    [
        {"label": torch.tensor(1)},
        {"label": np.array(1)},
        {"label": np.int64(1)},
        {"video": torch.tensor(0)},
        {"video": False},
        {"audio": np.array(0)},
        {"images": []},
        {"meta": {"path": "a.py", "bytes": 812}},
        {"meta": {"path": "a.py", "bytes": None}},
        {"meta": {"path": None, "bytes": None}},
        {"meta": {"array": None, "sampling_rate": 8}},
    ],
)
def test_columns_without_media_are_taken(columns: dict[str, Any]):
    row = {"input_ids": TOKENS, **columns}
    assert document(SMOLLM2, row).input_ids.tolist() == TOKENS
    assert LengthIndex.from_dataset([row]).lengths.tolist() == [6]
    assert len(as_documents([row])) == 1


def test_scalar_columns_of_a_torch_data_set_are_taken():
    dataset = Dataset.from_list([{"input_ids": TOKENS, "label": 1}] * 2).with_format("torch")
    assert [len(tokenised.input_ids) for tokenised in Tokenisation(None, "tokens")(list(dataset))] == [6, 6]


@pytest.mark.parametrize(
    "columns",
    [
        {"meta": {"photo": PICTURE}},
        {"meta": {"inner": {"photo": IMAGE}}},
        {"photos": [None, IMAGE]},
        {"meta": {"path": "cat.PNG", "bytes": None}},
        {"video": "cat.mp4"},
        {"images": torch.zeros(3, 2, 2)},
    ],
)
def test_media_are_found_in_structs_and_after_gaps(columns: dict[str, Any]):
    name = next(iter(columns))
    with pytest.raises(ValueError, match=f"document 0 has '{name}', and only text"):
        LengthIndex.from_dataset([{"input_ids": TOKENS, **columns}])


def test_media_in_structs_of_a_table_are_found_and_empty_ones_are_not():
    features = Features(
        {
            "input_ids": List(Value("int32")),
            "meta": {"name": Value("string"), "photo": Image()},
            "video": Value("bool"),
            "image": Value("large_string"),
            "audio": Value("float32"),
        }
    )
    empty = {"video": False, "image": "", "audio": 0.0, "meta": {"name": "a", "photo": None}}
    filled = {"video": True, "image": "cat.png", "audio": 0.5, "meta": {"name": "a", "photo": PICTURE}}
    rows = [{"input_ids": TOKENS, **empty}] * 2
    assert LengthIndex.from_dataset(Dataset.from_list(rows, features=features)).lengths.tolist() == [6, 6]
    for name, value in filled.items():
        dataset = Dataset.from_list([rows[0], {**rows[1], name: value}], features=features)
        for given, place in ((dataset, "row"), (list(dataset), "document")):
            with pytest.raises(ValueError, match=f"{place} 1 has '{name}'"):
                LengthIndex.from_dataset(given)
