"""`hf-longctx evaluate`: the same results on any number of ranks, as tables, JSON and pictures; a real model finds passkeys; what
cannot be evaluated is said, whichever rank notices it."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx import patch_model
from hf_longctx.certificate import Certificate
from hf_longctx.certificate import certificate as certificates
from hf_longctx.commands.evaluate import Wanted, evaluate, evaluate_on_rank
from hf_longctx.commands.shared.inference_precision import inference_precision
from hf_longctx.commands.shared.loading import load_model, load_tokenizer, readable_weights, resolved
from hf_longctx.commands.shared.ranks import loopback_store, start_ranks
from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded.embedded_model import prepare_model
from hf_longctx.inference.evaluation.evaluate import evaluate_model
from hf_longctx.inference.evaluation.retrieval import make_trials
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.models.traits import Traits
from hf_longctx.report.pictures.canvas import PictureError
from hf_longctx.report.pictures.evaluation_pictures import losses_figure, retrieval_figure
from hf_longctx.report.training_runs.saved_weights import weights_hash
from tests.builders.plain_scores import exchange_of_this_rank
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_general, tiny_llama
from tests.worlds.faults.failing_rank import fail_on_last
from tests.worlds.rank_pool import RankPool

CPU = torch.device("cpu")
TEXTS = ["Some words, said again and again. " * 30, "A line.\nAnother line, which is longer.\n" * 12, "Short."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Two models with a tokenizer of bytes, and documents."""
    path = tmp_path_factory.mktemp("evaluated")
    for name, layers in (("new", 2), ("old", 1)):
        tiny_llama(vocab_size=257, num_hidden_layers=layers).save_pretrained(path / name)
        byte_tokenizer().save_pretrained(path / name)
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def wanted(folder: Path, output: Path | None, **changes: Any) -> Wanted:
    settings: dict[str, Any] = {
        "model": str(folder / "new"),
        "against": str(folder / "old"),
        "data": str(folder / "texts.jsonl"),
        "split": None,
        "tasks": ("position", "length", "passkey", "needle"),
        "lengths": (450, 600),
        "depths": 2,
        "trials": 1,
        "seed": 0,
        "near": 64,
        "capacity": None,
        "dtype": "float32",
        "output": output,
    }
    return Wanted(**settings | changes)


def evaluated_on_rank(wanted: Wanted) -> None:
    evaluate_on_rank(CPU, exchange_of_this_rank(), wanted)


def without_environment(path: Path) -> dict[str, Any]:
    evaluation = json.loads((path / "evaluation.json").read_text())
    evaluation.pop("environment")
    return evaluation


def assert_close(one: Any, other: Any) -> None:
    """Nested results, numbers to 1e-5."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other):
            assert_close(mine, theirs)
    else:
        assert one == (pytest.approx(other, abs=1e-5) if isinstance(one, float) else other)


def test_any_number_of_ranks_finds_the_same(folder: Path, tmp_path: Path, ranks4: RankPool, capsys: Any):
    evaluate_on_rank(CPU, None, wanted(folder, tmp_path / "one"))
    shown = capsys.readouterr().out
    for ranks in (4, 2):
        if ranks == 4:
            ranks4.run(evaluated_on_rank, wanted(folder, tmp_path / "4"))
        else:  # as a user starts them, in processes of their own
            options = {
                "lengths": "450,600",
                "depths": 2,
                "trials": 1,
                "near": 64,
                "ranks": 2,
                "cpu": True,
                "dtype": "float32",
            }
            data = {"data": str(folder / "texts.jsonl"), "against": str(folder / "old")}
            evaluate(str(folder / "new"), output=tmp_path / "2", **options, **data)  # type: ignore[arg-type]
        assert_close(without_environment(tmp_path / str(ranks)), without_environment(tmp_path / "one"))
    evaluation = without_environment(tmp_path / "one")
    assert evaluation["documents"] == 3
    assert evaluation["tokens"] == sum(len(text) - 1 for text in TEXTS)
    assert evaluation["difference"]["overall"]["difference"] == pytest.approx(
        evaluation["loss"] - evaluation["against"]["loss"]
    )
    assert {cell["task"]: cell["trials"] for cell in evaluation["retrieval"]} == {"passkey": 1, "needle": 1}
    assert len(evaluation["retrieval"]) == 2 * 2 * 2
    for part in (
        "3 documents",
        "near loss",
        "128-255",
        "other's loss",
        "passkey, found by",
        "600 tokens",
        "0/1",
        "paired by",
    ):
        assert part in shown
    for name in ("losses.png", "retrieval.png"):
        assert imread(tmp_path / "one" / name).std() > 0.01
        assert f"written: {tmp_path / 'one' / name}" in shown


def test_only_what_is_asked_for_is_measured_and_tokens_need_no_tokenizer(folder: Path, tmp_path: Path, capsys: Any):
    tiny_llama().save_pretrained(tmp_path / "bare")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    bare = wanted(
        tmp_path, tmp_path / "out", model=str(tmp_path / "bare"), against=None, data=str(tmp_path / "ids.jsonl")
    )
    evaluate_on_rank(CPU, None, Wanted(**vars(bare) | {"tasks": ("length",), "near": 0}))
    evaluation = without_environment(tmp_path / "out")
    assert evaluation.keys() == {"model", "weights", "tokens", "documents", "loss", "by_length"}
    assert evaluation["weights"] == weights_hash(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"has no tokenizer.*; or --tasks position,length, which need none"):
        evaluate_on_rank(CPU, None, Wanted(**vars(bare) | {"tasks": ("length", "passkey")}))
    capsys.readouterr()
    evaluate_on_rank(CPU, None, Wanted(**vars(bare) | {"tasks": None, "near": 0}))
    assert f"No tokenizer beside {tmp_path / 'bare'}: passkey and needle are left out" in capsys.readouterr().out
    assert without_environment(tmp_path / "out").keys() == evaluation.keys() | {"by_position"}
    evaluate_on_rank(CPU, None, wanted(folder, None, against=None, tasks=None, near=0, depths=1))
    assert (
        "passkey and needle: 4 texts, together 2,100 tokens; --lengths, --depths and --trials make"
        in capsys.readouterr().err
    )
    broken = tiny_llama()
    broken.model.layers[0].self_attn.q_proj.weight.data *= 1e38
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(
        ValueError, match=r"the loss of .*broken is nan, computed in float32.*: some of its logits are not finite"
    ):
        evaluate_on_rank(CPU, None, Wanted(**vars(bare) | {"model": str(tmp_path / "broken"), "tasks": ("length",)}))
    byte_tokenizer(merges=[("a", "b")]).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="have different vocabularies"):
        evaluate_on_rank(CPU, None, wanted(folder, None, against=str(tmp_path / "bare")))
    with pytest.raises(ValueError, match=r"must be a run's YAML file, or documents\. As documents: must be embedded"):
        evaluate_on_rank(CPU, None, wanted(folder, None, data="nowhere.jsonl"))


def test_a_model_that_could_not_be_tested_is_evaluated_where_that_is_asked_for(tmp_path: Path, monkeypatch: Any):
    untested = Certificate("Untested", False, Traits(), tested=False)
    monkeypatch.setattr(certificates, "certificate_of", lambda model: untested)
    tiny_general("qwen3").save_pretrained(tmp_path / "bare")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": list(range(100))}) + "\n")
    given = vars(
        wanted(tmp_path, tmp_path / "out", model=str(tmp_path / "bare"), against=None, data=str(tmp_path / "ids.jsonl"))
    ) | {"tasks": ("length",), "near": 0}
    with pytest.raises(ValueError, match="Untested could not be tested"):
        evaluate_on_rank(CPU, None, Wanted(**given))
    evaluate_on_rank(CPU, None, Wanted(**given | {"uncertified": True}))
    model, ids = tiny_general("qwen3").eval(), torch.arange(100)[None]
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert without_environment(tmp_path / "out")["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "position,niah"}, "--tasks niah unknown; valid: position, length, passkey, needle"),
        ({"tasks": ","}, "--tasks ',' names none"),
        ({"lengths": "1KB"}, "--lengths '1KB' must be numbers of tokens"),
        ({"model": "/"}, "/ holds no config.json, no adapter_config.json and no checkpoint-"),
        ({"against": "/"}, "/ holds no config.json"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str, folder: Path):
    with pytest.raises(ValueError, match=message):
        evaluate(**{"model": str(folder / "new")} | options)


# A real model


def test_a_pretrained_model_finds_passkeys_and_writes_them():
    # What is counted as found is what plain transformers writes; a model that has learned nothing finds nothing.
    path = prepare_model(default_cache_dir())
    tokenizer = AutoTokenizer.from_pretrained(path)
    trials = make_trials(tokenizer, ["passkey"], [224], [0.0, 0.5, 1.0], trials=1)
    plain = AutoModelForCausalLM.from_pretrained(path).eval()
    written = []
    for trial in trials:
        ids = torch.from_numpy(trial.prompt)[None]
        with torch.no_grad():
            new = plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(trial.answer),
                do_sample=False,
                pad_token_id=0,
            )[0, len(trial.prompt) :]
        written.append(tokenizer.decode(new) == tokenizer.decode(trial.answer))
    del plain
    precision = inference_precision([str(path)], "auto", CPU)
    with precision.computing(CPU, keep_casts=False):
        cells = evaluate_model(load_model(str(path), precision.weights, CPU), trials=trials).retrieval
    assert [cell.found for cell in cells] == written
    assert sum(written) >= 2, "it can do this"
    nothing = patch_model(tiny_llama(vocab_size=len(tokenizer)))
    assert sum(cell.found for cell in evaluate_model(nothing, trials=trials).retrieval) == 0


# MODEL


def test_what_a_model_draws_while_it_trains_is_not_in_the_way(tmp_path: Path):
    plain = tiny_general("qwen3", attention_dropout=0.1)
    plain.save_pretrained(tmp_path)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        logits = load_model(str(tmp_path), "auto", CPU)(ids).logits
        torch.testing.assert_close(logits, plain.eval()(ids).logits, rtol=0, atol=1e-5)


def test_adapters_and_runs_are_models(folder: Path, tmp_path: Path, saved: Any):
    adapted = add_lora(AutoModelForCausalLM.from_pretrained(folder / "new"), r=2)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(30)[None]
    loaded = load_model(resolved(str(tmp_path / "adapter")), "auto", CPU)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(
            loaded(ids).logits, load_model(str(folder / "new"), "auto", CPU)(ids).logits, atol=1e-2
        )
    assert load_tokenizer(str(tmp_path / "adapter"))("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]
    output, _ = saved
    assert Path(resolved(str(output))).name == "checkpoint-6"
    assert load_model(resolved(str(output)), "bfloat16", CPU).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(str(tmp_path / "nothing"), "auto", CPU)


# Ranks


@pytest.mark.processes
def test_a_users_error_on_any_rank_is_one_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^rank 1 cannot read this$"):
        start_ranks(fail_on_last, (tmp_path,), 2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


# Pictures


def test_pictures_show_every_result_and_nothing_else():
    bucket = {"from": 0, "to": 128, "tokens": 5, "documents": 1, "loss": 2.0, "near_loss": 2.5}
    cells = [
        {"task": "passkey", "length": length, "depth": depth, "trials": 4, "found": hits}
        for length, depth, hits in ((1024, 0.0, 4), (1024, 1.0, 1), (4096, 0.0, 0))
    ]
    results = {
        "model": "new",
        "by_position": [bucket, {**bucket, "from": 128, "to": 256, "loss": 1.0}],
        "retrieval": cells,
    }
    figure = losses_figure(results)
    [panel] = figure.axes
    assert [line.get_ydata().tolist() for line in panel.lines] == [[2.0, 1.0], [2.5, 2.5]]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["128", "256"]
    both = losses_figure(results | {"against": {"model": "old", "by_length": [bucket]}, "by_length": [bucket]})
    assert [len(panel.lines) for panel in both.axes] == [2, 4]
    [heat] = retrieval_figure(results).axes
    assert sorted(text.get_text() for text in heat.texts) == ["0%", "100%", "25%"]
    assert [label.get_text() for label in heat.get_xticklabels()] == ["1K", "4K"]
    with pytest.raises(PictureError, match="holds no losses"):
        losses_figure({"model": "new"})
    with pytest.raises(PictureError, match="holds no retrieval"):
        retrieval_figure({"model": "new"})


def test_weights_that_cannot_be_written_are_not_taken_for_damaged_ones(tmp_path: Path):
    with pytest.raises(OSError, match=r"^weights could not be written: .*No such file"), readable_weights(tmp_path):
        save_file({"weight": torch.zeros(1)}, tmp_path / "missing" / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"), readable_weights(tmp_path):
        load_file(tmp_path / "model.safetensors")


def test_ranks_meet_where_no_other_machine_can_come():
    store = loopback_store()
    listening = [known.laddr for known in psutil.Process().net_connections() if known.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]
    store.set("name", "value")
    assert store.get("name") == b"value"
