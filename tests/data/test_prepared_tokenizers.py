"""A prepared folder used with another tokenizer than it was prepared with."""

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_longctx import LongContextPlugin
from hf_longctx.commands.shared.documents import Wanted, read_documents
from hf_longctx.data import tokenizer_state
from hf_longctx.data.prepare import PrepareError
from hf_longctx.data.prepared import MANIFEST, Manifest, load_prepared
from hf_longctx.run_documents import load_split
from hf_longctx.settings import DataConfig
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, arguments

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer() -> Any:
    """Byte tokenizer with a template."""
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Any) -> Callable[..., DataConfig]:
    """Prepares rows into a folder: returns what trains on it."""

    def make(row: dict[str, Any]) -> DataConfig:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        load_split(
            DataConfig(path=str(tmp_path / "rows.jsonl"), add_eos=False),
            "train",
            tokenizer,
            output=tmp_path / "prepared" / "train",
        )
        return DataConfig(path=str(tmp_path / "prepared"))

    return make


TEXT: dict[str, Any] = {"text": "some words"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def silent() -> Any:
    """Lets no warning pass that a test does not expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_another_tokenizer_is_refused_in_place_and_in_a_mixture(prepared: Any, tokenizer: Any, tmp_path: Path):
    data = prepared(TEXT)
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert load_split(data, "train", loaded).to_list() == load_split(data, "train", tokenizer).to_list()
    other = byte_tokenizer(merges=[("s", "o")])
    mixed = DataConfig(
        sources=[{"path": data.path, "add_eos": False}, {"path": str(tmp_path / "rows.jsonl"), "add_eos": False}]
    )
    for section in (data, mixed):
        with pytest.raises(
            ValueError, match=r"prepared with the tokenizer of .*fingerprint is \w{16}, .* other texts\. Valid: "
        ):
            load_split(section, "train", other)
    assert len(load_split(mixed, "train", tokenizer)) == 2
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="same ids would be other texts"):
        read_documents(str(data.path), Wanted(None, None), seed=0, longest=64, model=str(tmp_path / "other"))


def test_another_template_matters_where_it_decided_tokens(prepared: Any, tokenizer: Any, tmp_path: Path):
    data = prepared(CHAT)
    load_split(data, "train", tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("<", "[")
    with pytest.raises(ValueError, match=r"chat template with fingerprint \w{16}.*Valid: .*model\.chat_template"):
        load_split(data, "train", tokenizer)


@pytest.mark.parametrize(("row", "compared"), [(CHAT, True), (TEXT, False)], ids=["chat", "text"])
def test_a_prepared_folder_that_is_prepared_again_keeps_its_template(
    prepared: Any, tokenizer: Any, tmp_path: Path, row: dict[str, Any], compared: bool
):
    (tmp_path / "texts.jsonl").write_text(json.dumps(TEXT) + "\n")
    texts = {"path": str(tmp_path / "texts.jsonl"), "add_eos": False}
    mixed = DataConfig(sources=[{"path": prepared(row).path, "add_eos": False}, texts])
    load_split(mixed, "train", tokenizer, output=tmp_path / "mixed")
    again = DataConfig(path=str(tmp_path / "mixed"))
    assert len(load_split(again, "train", tokenizer)) == 2
    tokenizer.chat_template = TEMPLATE.replace("<", "[")
    with pytest.raises(ValueError, match="in a chat template with fingerprint") if compared else nullcontext():
        load_split(again, "train", tokenizer)


def test_texts_take_any_template(prepared: Any, tokenizer: Any):
    data = prepared(TEXT)
    tokenizer.chat_template = None
    load_split(data, "train", tokenizer)


def test_what_is_not_known_is_said_and_used(
    prepared: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = prepared(TEXT)
    with pytest.warns(UserWarning, match="none is known of the model, so whether .* is not checked"):
        load_split(data, "train", None)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_state, "version", lambda name: "0.0")
        with pytest.warns(
            UserWarning, match=r"may come from transformers [\d.]+, .* then and transformers 0\.0, .* now"
        ):
            load_split(data, "train", byte_tokenizer(merges=[("s", "o")]))
    folder = tmp_path / "prepared" / "train"
    kept = Manifest.read(folder)
    (folder / MANIFEST).write_text(replace(kept, tokenizers=None).to_json())
    with pytest.warns(UserWarning, match="does not say which tokenizer"):
        load_split(data, "train", byte_tokenizer(merges=[("s", "o")]))
    less = [replace(record, template="other") for record in kept.tokenizers or ()]
    for older in (None, less):
        (folder / MANIFEST).write_text(replace(kept, tokenizers=older).to_json())
        prepared(TEXT)
        assert Manifest.read(folder).tokenizers == kept.tokenizers, "preparing it again adds it"
    with pytest.raises(PrepareError, match="holds something else"):
        prepared({"text": "other words"})


def test_a_trainer_compares_what_was_opened_by_hand(prepared: Any, tmp_path: Path):
    prepared(TEXT)
    trainer = RecordingTrainer(
        model=tiny_llama(vocab_size=300),
        args=arguments(tmp_path / "run", num_train_epochs=1),
        train_dataset=load_prepared(tmp_path / "prepared" / "train"),
        processing_class=byte_tokenizer(merges=[("s", "o")]),
        plugin=LongContextPlugin(capacity=64, global_batch_documents=1),
    )
    with pytest.raises(ValueError, match="same ids would be other texts"):
        trainer.train()
