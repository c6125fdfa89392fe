"""Models that cannot be certified: refused, trained where that is asked for, or certified by a configuration of the user's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from hf_longctx import Layout, LongContextTrainer, Segment, patch_model
from hf_longctx.certificate import Conditions, run_check
from hf_longctx.certificate import certificate as certificates
from hf_longctx.cli import main
from hf_longctx.config import load_config
from hf_longctx.layouts.layout import LayoutError
from hf_longctx.models.documents import documents_of
from hf_longctx.run import run
from tests.builders.tiny_models import tiny_general
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state
from tests.certificate.planted_certificates import GOOD, fresh_process, settings

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.usefixtures("cannot_shrink")
def test_an_uncertified_model_is_trained_where_that_is_asked_for(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """One with a state, whose documents would run into each other in one call."""
    model, plain = tiny_general("qwen3_next", torch.float64), tiny_general("qwen3_next", torch.float64)
    with pytest.raises(ValueError, match=r"could not be tested.*no size is small.*uncertified=True"):
        patch_model(model)
    fresh_accelerator_state()
    trainer = LongContextTrainer(model, arguments(str(tmp_path)), **settings(), uncertified=True)
    assert "Qwen3NextForCausalLM is uncertified: no tiny copy could be tested" in trainer.certificate
    assert "no size is small enough" in caplog.text
    assert documents_of(model) == "alone"
    ids = torch.arange(32)[None] * 7 % 120
    patch_model(model).eval()
    with pytest.raises(LayoutError, match="one whole document in a micro-batch"):
        model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 23), Segment(1, 0, 9))}))
    logits = model(input_ids=ids, layout=Layout({0: (Segment(0, 0, 32),)})).logits
    assert torch.equal(logits, plain.eval()(input_ids=ids, use_cache=False).logits)


@pytest.mark.usefixtures("cannot_shrink")
def test_a_run_of_an_uncertified_model_says_so_everywhere(tmp_path: Path):
    fresh_accelerator_state()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents([9, 30, 8])))
    tiny_general("qwen3").save_pretrained(tmp_path / "model")
    arguments = {"max_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    configuration = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "rows.jsonl"), "kind": "tokens"},
        "longctx": {"capacity": 64},
        "training": {"output_dir": str(tmp_path / "run"), **arguments},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(configuration))
    with pytest.raises(ValueError, match="could not be tested"):
        run(load_config(tmp_path / "run.yaml"))
    fresh_accelerator_state()
    run(load_config(tmp_path / "run.yaml", ["model.uncertified=true"]))
    for name in ("run.json", "report.html", "README.md"):
        assert "Qwen3ForCausalLM is uncertified: no tiny copy" in (tmp_path / "run" / name).read_text()


def test_a_model_that_differs_is_refused_uncertified_or_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(certificates, "_test", lambda *args: replace(GOOD, exact=False, reason="planted"))
    with pytest.raises(ValueError, match="is not computed exactly over layouts: planted"):
        patch_model(tiny_general("qwen3"), uncertified=True)


SIZES = {"hidden_size": 48, "vocab_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.usefixtures("cannot_shrink")
def test_a_configuration_of_the_users_certifies_for_training(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tiny_general("qwen3").save_pretrained(tmp_path / "model")
    sizes = tmp_path / "tiny.json"
    sizes.write_text(json.dumps(SIZES))
    command = ["certify", str(tmp_path / "model"), "--config", str(sizes)]
    assert main(command) == 0
    assert "Qwen3ForCausalLM: exact over layouts" in capsys.readouterr().out
    fresh_process(monkeypatch)
    monkeypatch.setattr(certificates, "_test", None)
    model = patch_model(Qwen3ForCausalLM.from_pretrained(tmp_path / "model"))
    assert "tiny copy of a given configuration; documents over any ranks" in str(model.longctx_certificate)
    assert model.longctx_certificate.given["hidden_size"] == 48
    check = run_check(model, Conditions("cpu", "float32"))
    assert check.verdict == "within", check.reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ('{"hiden_size": 48}', "has fields that Qwen3Config lacks: hiden_size"),
        ('{"tie_word_embeddings": true}', "tie_word_embeddings is False in the model, True here"),
        ('{"use_sliding_window": true, "sliding_window": 4}', "sliding_window is None in the model, 4 here"),
        ('{"layer_types": ["sliding_attention", "sliding_attention"]}', "layer_types is"),
        ('{"hidden_size": "wide"}', "makes no Qwen3Config"),
    ],
)
def test_a_configuration_that_is_another_model_is_refused(content: str, message: str, capsys, tmp_path: Path):
    tiny_general("qwen3").config.save_pretrained(tmp_path)
    (tmp_path / "tiny.json").write_text(content)
    assert main(["certify", str(tmp_path), "--config", str(tmp_path / "tiny.json")]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_a_model_is_given_beside_tokens_is_refused():
    """Keywords that may be lost on the way, or change the meaning of logits."""
    model, layout = patch_model(tiny_general("qwen3")), Layout({0: (Segment(0, 0, 9),)})
    for keyword in ({"logits_to_keep": 1}, {"inputs_embeds": torch.zeros(1, 9, 64)}, {"anything": "else"}):
        with pytest.raises(ValueError, match=rf"{next(iter(keyword))}.* came with a layout"):
            model(input_ids=torch.arange(9)[None], layout=layout, **keyword)


def test_a_misspelt_model_type_is_said_to_be_one_before_the_hub_is_asked(capsys, monkeypatch):
    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("hf_longctx.commands.shared.costs.refuse_unreachable", asked)
    assert main(["certify", "lama"]) == 2
    reason = "'lama' is no directory, no model of the hub that can be read and no model type of transformers"
    assert f"{reason}; did you mean 'llama'?" in " ".join(capsys.readouterr().err.split())
