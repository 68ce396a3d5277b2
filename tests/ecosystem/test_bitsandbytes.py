"""Layers with weights of 4-bit codes in an ORTModule: MatMulBnb4 where the engine has the product, bitsandbytes' own
call elsewhere, equal to eager; LoRA over such a model, as QLoRA trains.
"""

import copy
import subprocess
import sys

import onnx
import pytest
import torch

bitsandbytes = pytest.importorskip("bitsandbytes")

import onnxtrain.dynamo  # noqa: E402
from onnxtrain.ortmodule import ORTModule  # noqa: E402

BF16 = onnx.TensorProto.BFLOAT16


class Net(torch.nn.Module):
    """A 4-bit layer from 64 or `width` to 48 features between two others."""

    def __init__(self, width=64, dtype=torch.float32, kind=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(16, width)
        self.layer = (kind or bitsandbytes.nn.Linear4bit)(width, 48, **options)
        self.layer.weight.data = self.layer.weight.data.to(dtype)
        self.after = torch.nn.Linear(48, 4)
        self.to("cpu")

    def forward(self, x):
        return self.after(torch.relu(self.layer(self.before(x))))


def nodes_of(model):
    """The nodes of all graphs that were exported of a model."""
    return [node for part in model._parts.runners() for _, programs in part.programs() for program in programs
            for node in onnx.load_from_string(program.exported.model).graph.node]


def same_step(plain, x, in_engine=True, rtol=1e-5, atol=1e-6):
    """Result and gradients of a copy in an ORTModule; whether the product is the engine's. The node, or None."""
    model = ORTModule(copy.deepcopy(plain))
    given, also = (x.clone().requires_grad_() for _ in range(2))
    want, got = plain(given), model(also)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    for result in (want, got):
        result.square().sum().backward()
    torch.testing.assert_close(also.grad, given.grad, rtol=rtol, atol=atol)
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=rtol, atol=atol, msg=name)
    plain.zero_grad()
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (1, 0, 1), counts
    kinds = [node.op_type for node in nodes_of(model)]
    assert (kinds.count("MatMulBnb4"), "PythonOp" in kinds) == ((1, False) if in_engine else (0, True)), kinds
    return next((node for node in nodes_of(model) if node.op_type == "MatMulBnb4"), None)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer(quant_type, nested, bias):
    """Scales as they are, or codes themselves; matrices and sequences."""
    plain = Net(quant_type=quant_type, compress_statistics=nested, bias=bias)
    assert plain.layer.quant_state.nested == nested
    for shape in ((5, 16), (2, 3, 16)):
        node = same_step(plain, torch.randn(shape))
        assert {a.name: a.i for a in node.attribute} == {"N": 48, "K": 64, "block_size": 64,
                                                         "quant_type": int(quant_type == "nf4")}


def test_many_nested_scales():
    """More than one block of 256 of them, and one that is not full."""
    plain = Net(width=448, quant_type="nf4")
    assert len(plain.layer.quant_state.absmax) == 336
    same_step(plain, torch.randn(5, 16))


@pytest.mark.parametrize("compute, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_computed_in_16_bits(compute, tolerance):
    plain = Net(quant_type="nf4", compute_dtype=compute, bias=False)
    same_step(plain, torch.randn(5, 16), rtol=tolerance, atol=tolerance)


def test_backward_rounds_to_the_dtype_that_the_weight_had():
    """bitsandbytes does, whatever forward computes in."""
    node = same_step(Net(dtype=torch.bfloat16, quant_type="nf4", compute_dtype=torch.float32), torch.randn(5, 16))
    assert {a.name: a.i for a in node.attribute}["grad_weight_dtype"] == BF16


def test_without_a_gradient():
    plain = Net(quant_type="nf4", bias=True)
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"]) == (1, 0), counts
    assert "MatMulBnb4" in [node.op_type for node in nodes_of(model)]


def test_a_gradient_of_the_bias_alone():
    plain = Net(quant_type="nf4")
    plain.before.requires_grad_(False)
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    for each in (plain, model):
        each(x).square().sum().backward()
    torch.testing.assert_close(model.layer.bias.grad, plain.layer.bias.grad)
    assert model.layer.weight.grad is None and model.before.weight.grad is None
    assert "PythonOp" not in [node.op_type for node in nodes_of(model)]


def test_new_codes_are_read():
    """Weights that are quantized again between steps, as after a merge."""
    plain, other = Net(quant_type="nf4"), Net(quant_type="nf4", dtype=torch.bfloat16)
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    torch.testing.assert_close(model(x), plain(x))
    for each in (plain, model):
        each.layer.weight = copy.deepcopy(other.layer.weight)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("options", [
    dict(quant_storage=torch.bfloat16),  # codes as bfloat16 numbers
    dict(width=96),  # rows that end within a block
], ids=["storage", "rows"])
def test_what_the_engine_lacks_is_bitsandbytes_own(options):
    same_step(Net(quant_type="nf4", **options), torch.randn(5, 16), in_engine=False)


def test_a_batch_without_rows():
    plain = Net(quant_type="nf4")
    model = ORTModule(copy.deepcopy(plain))
    for rows in (3, 0):
        results = [each(torch.ones(rows, 16)) for each in (plain, model)]
        torch.testing.assert_close(results[1], results[0])


def test_no_gradients_of_gradients():
    """An error in place of a part of them; the gradients themselves are there."""
    plain = Net(quant_type="nf4")
    model = ORTModule(copy.deepcopy(plain))
    found = []
    for each in (plain, model):
        x = torch.ones(5, 16, requires_grad=True)
        found += torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(found[1], found[0])
    with pytest.raises(RuntimeError, match="cannot be differentiated again here: it has matrix products of"
                                           " bitsandbytes"):
        found[1].square().sum().backward()


def test_in_a_checkpoint():
    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(quant_type="nf4", compute_dtype=torch.float32)  # else the first call sets it: no checkpoint

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

    plain = Part()
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    for each in (plain, model):
        each(x).square().sum().backward()
    torch.testing.assert_close(model.net.before.weight.grad, plain.net.before.weight.grad)
    assert onnxtrain.stats(model)["fallback_steps"] == 0
    assert [node.op_type for node in nodes_of(model)].count("MatMulBnb4") == 1


def test_pytorch_runs_the_same_graph():
    """Where the engine does not: bitsandbytes' own operator, forward and backward."""
    plain = Net(quant_type="nf4")
    compiled = torch.compile(copy.deepcopy(plain), backend=onnxtrain.dynamo.backend)
    x = torch.randn(5, 16)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)  # one that no graph may call
    try:
        results = [each(x) for each in (plain, compiled)]
        for result in results:
            result.square().sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(compiled.before.weight.grad, plain.before.weight.grad, rtol=0, atol=0)


def test_8_bits_are_bitsandbytes_own():
    plain = Net(kind=bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False)
    model = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    grads = []
    for each in (plain, model):
        each(x).square().sum().backward()
        grads.append(each.before.weight.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert "MatMulBnb4" not in [node.op_type for node in nodes_of(model)]


def test_nothing_else_imports_it():
    code = ("import sys, torch; from onnxtrain.ortmodule import ORTModule; "
            "ORTModule(torch.nn.Linear(3, 2))(torch.ones(1, 3)).sum().backward(); "
            "assert 'bitsandbytes' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


IDS = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(1))


def quantized_llama(folder):
    """A Llama whose linear layers transformers quantizes while it loads them, with scales that are codes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
                                      use_cache=False)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                   bnb_4bit_use_double_quant=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization,
                                                             device_map="cpu", dtype=torch.float32)


def test_qlora(tmp_path):
    """Losses, gradients and weights of adapters over 4-bit layers; adapters off and on again."""
    peft = pytest.importorskip("peft")
    base = peft.prepare_model_for_kbit_training(quantized_llama(tmp_path), use_gradient_checkpointing=False)
    plain = peft.get_peft_model(base, peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM",
        init_lora_weights=False)).train()
    models = (plain, ORTModule(copy.deepcopy(plain)))
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2) for model in models]

    def losses():
        return [model(input_ids=IDS, labels=IDS).loss for model in models]

    for _ in range(2):
        found = losses()
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
        for optimizer, loss in zip(optimizers, found):
            optimizer.zero_grad()
            loss.backward()
        for (name, a), (_, b) in zip(plain.named_parameters(), models[1].named_parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == ("lora_" not in name), name
            if a.grad is not None:
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    kinds = [node.op_type for node in nodes_of(models[1])]
    assert kinds.count("MatMulBnb4") == 7 and "PythonOp" not in kinds, kinds
    with plain.disable_adapter(), models[1].disable_adapter():
        off = losses()
        torch.testing.assert_close(off[1], off[0], rtol=1e-5, atol=1e-6)
    on = losses()
    torch.testing.assert_close(on[1], on[0], rtol=1e-4, atol=1e-5)
    assert abs(on[1].item() - off[1].item()) > 1e-4
    counts = onnxtrain.stats(models[1])
    assert counts["fallback_steps"] == 0, counts
