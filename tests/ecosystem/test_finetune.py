"""`python -m onnxtrain finetune` on a tiny Llama with a tokenizer of its own: the losses of plain Trainer, an adapter and a
merged model that are read back, a run that is interrupted, and what the user did wrong in one sentence.
"""

from __future__ import annotations

import json
import re
import resource
import signal

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import onnxtrain.integrations  # noqa: E402
from onnxtrain import finetune  # noqa: E402

TEXTS = [f"the {a} cat {b} on a {c} mat" for a in ("red", "old", "big") for b in ("sat", "ran") for c in ("new", "wet")]
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, as save_pretrained() writes them."""
    path = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator([*TEXTS, "user assistant"], tokenizers.trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<eos>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128)).save_pretrained(path)
    return path


@pytest.fixture
def data(tmp_path):
    rows = [{"text": text} for text in TEXTS[:4]]
    rows += [{"prompt": text[:8], "completion": text[8:]} for text in TEXTS[4:8]]
    rows += [{"messages": [{"role": "user", "content": text}]} for text in TEXTS[8:]]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def run(capfd, folder, data, out, *more):
    """The status, and what was printed, mistakes last."""
    status = finetune.main(["--model", str(folder), "--data", str(data), "--out", str(out), "--base", "float32",
                            "--lora_r=4", "--learning-rate", "0.01", "--gradient-accumulation-steps", "2",
                            "--num-train-epochs", "2", *more])
    return status, "".join(capfd.readouterr())


def losses(text):
    return [float(each) for each in re.findall(r"loss ([\d.]+)", text)]


def weights(out):
    from safetensors.torch import load_file

    return load_file(out / "adapter_model.safetensors")


def test_losses_are_those_of_trainer_alone(capfd, folder, data, tmp_path, monkeypatch):
    status, text = run(capfd, folder, data, tmp_path / "ours", "--merged", str(tmp_path / "merged"))
    assert status == 0 and "12 examples" in text and "update 12 of 12" in text and "tokens/s" in text
    assert not list((tmp_path / "ours").glob("checkpoint-*")) and not (tmp_path / "ours" / ".part").exists()

    wrapped = []
    monkeypatch.setattr(onnxtrain.integrations, "wrap_trainer", lambda trainer: wrapped.append(trainer) or trainer)
    _, plain = run(capfd, folder, data, tmp_path / "plain")
    assert wrapped and losses(text) == pytest.approx(losses(plain), rel=2e-3) and losses(text)[-1] < losses(text)[0] - 0.3
    for name, ours in weights(tmp_path / "ours").items():
        torch.testing.assert_close(ours, weights(tmp_path / "plain")[name], rtol=0.02, atol=2e-3, msg=name)

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-3, atol=1e-4)


def test_goes_on_after_an_interruption(capfd, folder, data, tmp_path, monkeypatch):
    run(capfd, folder, data, tmp_path / "whole")
    plain, batches = finetune.batch_of, []

    def interrupting(*args):
        batches.append(args)
        if len(batches) == 7:
            signal.raise_signal(signal.SIGINT)
        return plain(*args)

    monkeypatch.setattr(finetune, "batch_of", interrupting)
    status, text = run(capfd, folder, data, tmp_path / "parts")
    assert status == 0 and "Ctrl-C" in text and "the same command goes on" in text and len(losses(text)) < 12
    assert not (tmp_path / "parts" / "adapter_model.safetensors").exists()
    status, rest = run(capfd, folder, data, tmp_path / "parts")
    assert status == 0 and "goes on from there" in rest and len(losses(text)) + len(losses(rest)) == 12
    for name, value in weights(tmp_path / "parts").items():
        torch.testing.assert_close(value, weights(tmp_path / "whole")[name], msg=name)


@pytest.mark.parametrize("limit, says", [("900GB", "memory level 0"), ("2MB", "more than --memory")])
def test_memory(limit, says, capfd, folder, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")  # which the command replaces
    status, text = run(capfd, folder, data, tmp_path / "out", "--memory", limit, "--max-steps", "1")
    assert says in text and status == ("more than" in says)


def test_four_bits(capfd, folder, data, tmp_path):
    pytest.importorskip("bitsandbytes")
    status, text = run(capfd, folder, data, tmp_path / "out", "--base", "nf4", "--merged", str(tmp_path / "merged"),
                       "--max-steps", "3")
    assert status == 0 and "in nf4" in text and "read back" in text and (tmp_path / "merged" / "config.json").exists()


@pytest.mark.parametrize("line, says", [
    ("{", "line 1 is no JSON"), ('{"texts": "a"}', "line 1 is no object with text"), ("", "no example"),
    ('{"messages": []}', "line 1 is no object"), ('{"messages": ["a"]}', "line 1: the chat template refuses"), ('{"prompt": "the", "completion": ""}', None),
])
def test_bad_data(line, says, capfd, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(line)
    status, text = run(capfd, folder, tmp_path / "bad.jsonl", tmp_path / "out", "--max-steps", "1")
    assert (status, f"finetune: {tmp_path}" in text and says in text) == (1, True) if says else status == 0
    assert not says or not (tmp_path / "out").exists()


@pytest.mark.parametrize("most", [1000, 30_000, 60_000, 110_000])
def test_a_full_disk(most, capfd, folder, data, tmp_path):
    """A file that may not grow fails as one on a full disk; the adapter, the optimizer's state, or another one is the
    first that is too long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    plain = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        status, text = run(capfd, folder, data, tmp_path / "out", "--save-steps", "3", "--max-steps", "4", "--lora-r", "16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, plain)
    assert status == 1 and text.count("finetune: ") == 1 and f"{tmp_path / 'out'} cannot be written" in text
    status, text = run(capfd, folder, data, tmp_path / "out", "--save-steps", "3", "--max-steps", "4", "--lora-r", "16")
    assert status == 0 and len(losses(text)) == 4 and weights(tmp_path / "out")


def test_bad_options(capfd, folder, data, tmp_path):
    for more, says in ((["--target-modules", "q_prod"], "--target-modules q_prod"),
                       (["--model", str(tmp_path / "none")], "cannot be loaded"), (["--memory", "half"], "--memory: ")):
        status, text = run(capfd, folder, data, tmp_path / "out", *more)
        assert status == 1 and says in text and text.count("finetune: ") == 1
    (tmp_path / "file").write_text("")
    status, text = run(capfd, folder, data, tmp_path / "file", "--max-steps", "1")
    assert status == 1 and "cannot be written" in text
