"""save_as_onnx in the opset that the caller gave."""

import importlib.util

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from eager_training import batches, cross_entropy, net, options
from onnx import helper

import onnxtrain
from onnxtrain.training import ORTTrainer, ORTTrainerOptions, legacy, optim
from onnxtrain.training._opset import converted


def evaluated(model, feeds):
    """By onnxruntime where it is installed, else by onnx's reference."""
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        if hasattr(onnxruntime, "InferenceSession"):
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            return session.run(None, feeds)
    return onnx.reference.ReferenceEvaluator(model).run(None, feeds)


# --- one operator ------------------------------------------------------------------------------------------------------

AXIS = "a = Constant<value = int64[1] {1}>() "
# Body, inputs, outputs, and what opset 12 makes of it.
OPERATORS = [
    (AXIS + "y = ReduceMean<keepdims = 0>(x, a)", "float[2,3] x", "float[2] y", "ReduceMean"),
    ("y = ReduceMax(x)", "float[2,3,4] x", "float[1,1,1] y", "ReduceMax"),
    (AXIS + "y = Unsqueeze(x, a)", "float[2,3] x", "float[2,1,3] y", "Unsqueeze"),
    (AXIS + "y = Squeeze(x, a)", "float[2,1,3] x", "float[2,3] y", "Squeeze"),
    ("y, z = Split<axis = 0, num_outputs = 2>(x)", "float[2,3] x", "float[1,3] y, float[1,3] z", "Split"),
    ("s = Constant<value = int64[2] {1, 2}>() y, z = Split<axis = 1>(x, s)", "float[2,3] x",
     "float[2,1] y, float[2,2] z", "Split"),
    ("y = Shape<start = 1>(x)", "float[2,3] x", "int64[1] y", "Shape Constant Constant Slice"),
    ("y = Shape<start = -2, end = -1>(x)", "float[2,3,4] x", "int64[1] y", "Shape Constant Constant Slice"),
    ("s = Constant<value = int64[2] {3, 2}>() y = Reshape<allowzero = 1>(x, s)", "float[2,3] x", "float[3,2] y",
     "Constant Reshape"),
    ("y = Softmax(x)", "float[2,3,4] x", "float[2,3,4] y", "Softmax"),
    ("y = Softmax<axis = 1>(x)", "float[2,3,4] x", "float[2,3,4] y", "Transpose Softmax Transpose"),
    ("y = LogSoftmax<axis = 0>(x)", "float[2,3] x", "float[2,3] y", "Transpose LogSoftmax Transpose"),
    ("y = Trilu<upper = 1>(x, k)", "float[3,4] x, int64 k", "float[3,4] y", "Where"),
    ("k = Constant<value = int64 {-1}>() y = Trilu<upper = 0>(x, k)", "bool[2,3,4] x", "bool[2,3,4] y", "And"),
    ("y = CastLike(x, z)", "float[3,3] x, double z", "double[3,3] y", "Cast"),
    ("y = HardSwish(x)", "float[3,3] x", "float[3,3] y", "HardSigmoid Mul"),
    ("y = Mish(x)", "float[3,3] x", "float[3,3] y", "Softplus Tanh Mul"),
    ("y = LayerNormalization(x, w)", "float[2,3] x, float[3] w", "float[2,3] y", "ReduceMean"),
    ("y, m, v = LayerNormalization<axis = 1, epsilon = 0.1>(x, w, b)",
     "float[2,3,4] x, float[3,4] w, float[3,4] b", "float[2,3,4] y, float[2,1,1] m, float[2,1,1] v", "Reciprocal"),
    ("y, , v = LayerNormalization(x, w)", "float[2,3] x, float[3] w", "float[2,3] y, float[2,1] v", "Reciprocal"),
    ("y = LayerNormalization(x, w)", "float16[2,3] x, float16[3] w", "float16[2,3] y", "ReduceMean"),
    ("y, h, c = LSTM<hidden_size = 4>(x, w, r, b)",
     "float[5,2,3] x, float[1,16,3] w, float[1,16,4] r, float[1,32] b",
     "float[5,1,2,4] y, float[1,2,4] h, float[1,2,4] c", "LSTM"),
    ("y = ScatterND(x, i, u)", "float[5,2] x, int64[1,1] i, float[1,2] u", "float[5,2] y", "ScatterND"),
    ("y = AveragePool<kernel_shape = [2, 2]>(x)", "float[1,1,4,4] x", "float[1,1,3,3] y", "AveragePool"),
    ("p = Constant<value = int64[4] {1, 0, 1, 2}>() y = Pad(x, p)", "float[2,2] x", "float[4,4] y", "Constant Pad"),
    ('s = Constant<value = float[4] {1, 1, 2, 2}>() y = Resize<mode = "linear">(x, , s)', "float[1,1,2,2] x",
     "float[1,1,4,4] y", "Constant Constant Resize"),
    ("y = Pow(x, x)", "float[2,2] x", "float[2,2] y", "Pow"),
    ("y = SoftmaxCrossEntropyLoss(x, i)", "float[2,2] x, int64[2] i", "float y", "SoftmaxCrossEntropyLoss"),
    ("y = If <then_branch = t () => (float[2,3] u) { " + AXIS + "q = ReduceMean(x, a) u = Add(q, x) }, "
     "else_branch = e () => (float[2,3] v) { v = Identity(x) }>(c)", "float[2,3] x, bool c", "float[2,3] y", "If"),
]


def model_of(body, inputs, outputs):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {body} }}')


def drawn(model):
    draw = np.random.default_rng(0)
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        given = draw.random(shape)
        yield value.name, given > 0.4 if dtype == bool else np.asarray(given * (dtype != np.int64)).astype(dtype)


@pytest.mark.parametrize("opset", [12, 13, 17])
@pytest.mark.parametrize("body, inputs, outputs, expected", OPERATORS)
def test_an_operator_in_an_older_opset(body, inputs, outputs, expected, opset):
    model = model_of(body, inputs, outputs)
    older = converted(model, opset)
    assert [o.version for o in older.opset_import] == [opset] and older.ir_version == (7 if opset < 15 else 8)
    if opset == 12:
        made = [node.op_type for node in older.graph.node]
        assert made == expected.split() if " " in expected else expected in made
    feeds = dict(drawn(model))
    for want, got in zip(onnx.reference.ReferenceEvaluator(model).run(None, feeds), evaluated(older, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=5e-3 if want.dtype == np.float16 else 1e-5, atol=1e-6)
        assert got.dtype == want.dtype


@pytest.mark.parametrize("body, inputs, outputs, opset, message", [
    ("y = GridSample(x, g)", "float[1,1,2,2] x, float[1,2,2,2] g", "float[1,1,2,2] y", 12,
     r"opset 12 of ONNX has no form of GridSample \(which is of opset 16\)"),
    ('y = ScatterElements<reduction = "add">(x, i, u)', "float[5,2] x, int64[1,1] i, float[1,1] u", "float[5,2] y", 14,
     r"ScatterElements \(with reduction\)"),
    ("y = ReduceMax(x, a)", "float[2,3] x, int64[1] a", "float[p,q] y", 17, "ReduceMax .of which axes has to be a const"),
    ("y, z = Split<num_outputs = 2>(x)", "float[3] x", "float[2] y, float[1] z", 17, "Split .into parts"),
    ("y = Add(x, x)", "int8[2] x", "int8[2] y", 12, "not valid in opset 12 of ONNX: .*Add"),
])
def test_what_an_older_opset_does_not_have(body, inputs, outputs, opset, message):
    with pytest.raises(onnxtrain.UnsupportedError, match=message):
        converted(model_of(body, inputs, outputs), opset)


def test_a_constant_row_is_normalized():
    """As the difference of two means its variance is below 0."""
    model = converted(model_of("y = LayerNormalization(x, w)", "float[1,7] x, float[7] w", "float[1,7] y"), 12)
    row = np.full((1, 7), 1234.567, np.float32)
    assert np.abs(evaluated(model, {"x": row, "w": np.ones(7, np.float32)})[0]).max() < 0.1


# --- models ------------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(8, 4)

    def forward(self, x):
        hidden = F.hardswish(self.second(F.max_pool2d(F.relu(self.first(x)), 2)))
        hidden = F.avg_pool2d(F.interpolate(hidden, scale_factor=2, mode="bilinear"), 2)
        return self.out(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(32, 4)
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.out(self.lstm(self.table(x))[0][:, -1])


class Bert(nn.Module):
    """Token and position embeddings, padding, GELU, post-normalization."""

    def __init__(self):
        super().__init__()
        self.table, self.places, self.norm, self.out = (nn.Embedding(20, 16), nn.Embedding(32, 16), nn.LayerNorm(16),
                                                        nn.Linear(16, 4))
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)

    def forward(self, x):
        hidden = self.norm(self.table(x) + self.places(torch.arange(x.shape[1])))
        return self.out(self.layer(hidden, src_key_padding_mask=x == 0)).mean(1)


class GettingStarted(nn.Module):
    """The sample of onnxruntime-training: a causal mask of -inf, made in forward; time first."""

    def __init__(self):
        super().__init__()
        self.table, self.layer, self.out = (nn.Embedding(20, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.2),
                                            nn.Linear(16, 20))

    def forward(self, x):
        mask = torch.triu(torch.ones(x.shape[0], x.shape[0])).transpose(0, 1)
        mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
        return self.out(self.layer(self.table(x) * 4.0, mask)).view(-1, 20)


class Gpt(nn.Module):
    """Causal attention, by scaled_dot_product_attention and by a buffer's triangle."""

    def __init__(self):
        super().__init__()
        self.table, self.heads, self.norm, self.out = (nn.Embedding(20, 16), nn.Linear(16, 48), nn.LayerNorm(16),
                                                       nn.Linear(16, 20))
        self.register_buffer("seen", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        batch, length = x.shape
        hidden = self.table(x)
        query, key, value = [part.view(batch, length, 4, 4).transpose(1, 2)
                             for part in self.heads(self.norm(hidden)).split(16, dim=2)]
        hidden = hidden + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(
            batch, length, 16)
        scores = (query @ key.transpose(-2, -1)).masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        return F.log_softmax(self.out(hidden + (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, 16)),
                             -1).view(-1, 20)


def tokens(*shape):
    return torch.randint(0, 20, shape)


MODELS = {
    "linear": (lambda: net(dropout=0.2), lambda: (torch.randn(3, 8), torch.randint(0, 4, (3,))),
               (["b", 8], ["b"], ["b", 4])),
    "convolutions": (Convolutions, lambda: (torch.randn(3, 3, 12, 12), torch.randint(0, 4, (3,))),
                     (["b", 3, 12, 12], ["b"], ["b", 4])),
    "lstm": (Recurrent, lambda: (tokens(3, 7), torch.randint(0, 4, (3,))), (["b", "s"], ["b"], ["b", 4])),
    "bert": (Bert, lambda: (tokens(3, 7), torch.randint(0, 4, (3,))), (["b", "s"], ["b"], ["b", 4])),
    "getting_started": (GettingStarted, lambda: (tokens(5, 3), tokens(15)), (["s", "b"], ["t"], ["t", 20])),
    "gpt": (Gpt, lambda: (tokens(3, 7), tokens(21)), (["b", "s"], ["t"], ["t", 20])),
}


def older(module, shapes, opset=None, change=None):
    """A trainer of the older form, and its step."""
    inputs, label, scores = shapes
    described = legacy.ModelDescription(
        [legacy.IODescription("x", inputs), legacy.IODescription("label", label)],
        [legacy.IODescription("loss", []), legacy.IODescription("scores", scores)])
    given = {} if opset is None else {"_opset_version": opset}
    trainer = legacy.ORTTrainer(module, cross_entropy, described, "SGDOptimizer", None,
                                legacy.IODescription("rate", [1]), "cpu", _extra_postprocess=change, **given)
    return trainer, lambda *batch: trainer.train_step(*batch, torch.tensor([0.1]))


def newer(module, shapes, opset=None, change=None):
    """A trainer of the newer form, and its step."""
    inputs, label, scores = shapes
    use = {} if opset is None else {"onnx_opset_version": opset}
    trainer = ORTTrainer(module, {"inputs": [("x", inputs), ("label", label)],
                                  "outputs": [("loss", [], True), ("scores", scores)]}, optim.SGDConfig(lr=0.1),
                         cross_entropy, options(_internal_use={**use, "extra_postprocess": change}))
    return trainer, trainer.train_step


@pytest.mark.parametrize("form, opset", [(older, 12), (newer, 13)])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_an_older_opset(name, form, opset, tmp_path):
    torch.manual_seed(0)
    make, batch, shapes = MODELS[name]
    trainer, step = form(make(), shapes, opset)
    step(*batch())
    path = str(tmp_path / "model.onnx")
    trainer.save_as_onnx(path)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    for _ in range(2):
        x, label = batch()
        wanted = [result.numpy() for result in trainer.eval_step(x, label)]
        for got, want in zip(evaluated(model, {"x": x.numpy(), "label": label.numpy()}), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_without_an_opset_it_is_20(tmp_path):
    given = ORTTrainerOptions({"device": {"id": "cpu"}})
    assert given._internal_use.onnx_opset_version == 20 and given._validated_opts["_internal_use"][
        "onnx_opset_version"] == 14
    assert ORTTrainerOptions({"_internal_use": {"onnx_opset_version": 14}})._internal_use.onnx_opset_version == 14
    for form in (older, newer):
        trainer, step = form(net(), MODELS["linear"][2])
        step(*batches(1)[0])
        trainer.save_as_onnx(str(tmp_path / "model.onnx"))
        assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 20


def test_a_module_that_the_opset_cannot_express(tmp_path):
    class Samples(nn.Linear):
        def forward(self, x):
            grid = torch.zeros(x.shape[0], 1, 4, 2)
            return F.grid_sample(super().forward(x).view(-1, 1, 2, 2), grid, align_corners=False).view(-1, 4)

    trainer, step = older(Samples(8, 4), MODELS["linear"][2], 12)
    step(*batches(1)[0])
    with pytest.raises(onnxtrain.UnsupportedError, match="opset 12 of ONNX has no form of GridSample"):
        trainer.save_as_onnx(str(tmp_path / "model.onnx"))
    assert not list(tmp_path.iterdir())


# --- a function that changes the graph ---------------------------------------------------------------------------------
