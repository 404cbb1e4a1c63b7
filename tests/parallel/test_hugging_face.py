"""docs/hugging-face.md: its modules train small models, laid out like published ones, in several recipes."""

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from scripts.dev import export
from tests.conftest import slow
from tests.support import ROOT, TIMEOUT_S, largest_difference, losses, train, weights

TEXT = (ROOT / "docs/hugging-face.md").read_text()
CHAT, LORA, VIT, SPLIT, SEQUENCE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MERGE, CONFIGURE = re.findall(r"python -c '(.*)'", TEXT)
CHARACTERS = "0123456789+= "
OPTIONS = ("--optimizer", "adamw", "--lr", "1e-3", "--max-steps", "8", "--global-batch-size", "12")
ANSWERS = ("--data", "chat:answers", *OPTIONS)
WEIGHTS = ("--weights", "Qwen3-0.6B")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the page's modules, and models and data of the names that they have there."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)} | {"<end>": 13}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    language = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(**language, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "Qwen3-0.6B", max_shard_size="20KB")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        folder / "Qwen3-0.6B"
    )
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 7, "num_hidden_layers": 2}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **image))
    model.save_pretrained(folder / "vit-base-patch16-224")
    lines = [{"prompt": f"{n} + 25 =", "answer": f" {n + 25}"} for n in range(200)]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    chat = CHAT + LORA + SPLIT + SEQUENCE
    (folder / "chat.py").write_text(chat.replace('"Qwen3-0.6B", 256', '"Qwen3-0.6B", 16'))
    (folder / "images.py").write_text(VIT)
    return folder


def start_in(folder):
    """Let a rank start in a folder, and import modules from there."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def run(folder):
    """Return a function that trains, once for the same arguments, and returns the run's folder."""
    return functools.cache(
        lambda recipe, world_size, *argv: train(
            recipe, folder / str(abs(hash(argv))), world_size, *argv, setup=functools.partial(start_in, folder)
        )
    )


def assert_same(ours, expected):
    assert losses(ours) == pytest.approx(losses(expected), rel=1e-5)
    assert largest_difference(weights(ours), weights(expected)) < 1e-4


IN_FP32 = {"horovod": ("--compression", "none"), "apex": ("--opt-level", "O0")}


@pytest.mark.parametrize("recipe", ["fsdp", *slow("ddp", "spawn", "horovod", "apex", "scratch", "dataparallel")])
def test_a_language_model_has_one_curve(run, recipe):
    tuned = ("--model", "chat:net", *WEIGHTS)
    expected = run("single", 1, *ANSWERS, *tuned)
    ours = run(recipe, 1 if recipe == "dataparallel" else 2, *ANSWERS, *tuned, *IN_FP32.get(recipe, ()))
    assert_same(ours, expected)
    assert {value.dtype for value in weights(ours).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("recipe", "model", "options"),
    slow(
        ("tensor", "split", ()),
        ("context", "split", ()),
        ("fsdp", "split", ("--activation-checkpointing",)),
        ("pipeline", "sequence", ("--stages", "2")),
    ),
)
def test_the_split_model_has_the_curve_of_the_whole_one(run, recipe, model, options):
    expected = run("single", 1, *ANSWERS, "--model", "chat:net", *WEIGHTS)
    assert_same(run(recipe, 2, *ANSWERS, "--model", f"chat:{model}", *WEIGHTS, *options), expected)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_rotations_that_depend_on_the_longest_position_of_a_rank_are_refused(folder, tmp_path, monkeypatch, kind):
    monkeypatch.syspath_prepend(folder)
    chat = importlib.import_module("chat")
    rotations = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    transformers.Qwen3Config(**SMALL, num_hidden_layers=1, rope_parameters=rotations).save_pretrained(tmp_path)
    monkeypatch.setattr(chat, "BASE", str(tmp_path))
    if kind == "default":
        chat.split(None)
    else:
        with pytest.raises(ValueError, match="rotations depend on the longest position"):
            chat.split(None)


@pytest.mark.parametrize("recipe", slow("ddp", "fsdp"))
def test_lora_trains_its_matrices_alone(run, recipe):
    expected = run("single", 1, *ANSWERS, "--model", "chat:lora", "--lr", "0.01")
    assert_same(run(recipe, 2, *ANSWERS, "--model", "chat:lora", "--lr", "0.01"), expected)
    initial = weights(run("single", 1, *ANSWERS, "--model", "chat:net", *WEIGHTS, "--lr", "1e-12"))
    moved = {name for name, value in weights(expected).items() if "lora_B" in name and value.any()}
    assert len(moved) == 14  # seven linear layers of each of the two blocks
    name = "model.layers.0.mlp.up_proj.{}weight"
    frozen = weights(expected)[f"base_model.model.{name.format('base_layer.')}"]
    torch.testing.assert_close(frozen, initial[name.format("")], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_lora_is_merged(run, folder):
    ours = run("single", 1, *ANSWERS, "--model", "chat:lora", "--lr", "0.01")
    assert export.main([str(ours), str(folder / "lora.pt")]) == 0
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MERGE], cwd=folder, env=env, check=True, timeout=TIMEOUT_S)
    shutil.copy(folder / "Qwen3-0.6B" / "config.json", folder / "merged")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    name, given = "model.layers.1.mlp.up_proj", weights(ours)
    base, a, b = (
        given[f"base_model.model.{name}.{part}.weight"]
        for part in ("base_layer", "lora_A.default", "lora_B.default")
    )
    torch.testing.assert_close(model.get_parameter(f"{name}.weight"), base + b @ a * 8 / 16)


@pytest.mark.slow
def test_a_model_of_images_gets_a_new_head(run, folder):
    options = ("--model", "images:vit", "--weights", "vit-base-patch16-224", *OPTIONS)
    expected = run("single", 1, *options)
    assert_same(run("ddp", 2, *options), expected)
    output = "".join(path.read_text() for path in (expected.parent / "output-single-1").iterdir())
    assert "of another shape: classifier.weight, classifier.bias" in output
    code = CONFIGURE.replace('"tuned"', '"flowers"')
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=TIMEOUT_S)
    assert transformers.AutoConfig.from_pretrained(folder / "flowers").num_labels == 102


def test_from_pretrained_loads_what_is_exported(run, folder):
    ours = run("single", 1, *ANSWERS, "--model", "chat:net", *WEIGHTS)
    shutil.copytree(folder / "Qwen3-0.6B", folder / "tuned")
    for path in folder.glob("tuned/*.safetensors*"):
        path.unlink()
    assert export.main([str(ours), str(folder / "tuned" / "model.safetensors")]) == 0
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "tuned", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    assert largest_difference(model.state_dict(), weights(ours)) == 0


def test_answers_count_and_prompts_do_not(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    inputs, targets = importlib.import_module("chat").answers()["train"]
    tokens = transformers.AutoTokenizer.from_pretrained("Qwen3-0.6B").convert_ids_to_tokens
    row = 7 - 1  # the first of 20 lines is for the test
    assert "".join(tokens(inputs[row])) == "7 + 25 = 3200000"
    assert targets[row].ne(-100).nonzero().flatten().tolist() == [7, 8, 9, 10]
    assert "".join(tokens(targets[row, 7:11])) == " 32<end>"
    assert targets.shape == inputs.shape == (190, 16)
