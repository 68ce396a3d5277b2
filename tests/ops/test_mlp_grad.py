"""MlpGrad, which only passes/tile_mlp.c builds: its kernel against the reference, for every implementation of GEMM."""

import pytest
import torch
from harness import failing_allocations
from test_tile_mlp import mlp, step

from onnxtrain import _C


@pytest.fixture(autouse=True)
def switches_as_they_were():
    yield
    _C.disable_passes([])
    _C.disable_kernels([])


@pytest.mark.parametrize("gemm", ["native", "reference", "onednn", "torch"])
@pytest.mark.parametrize("form", ["linear", "plain"])
def test_tiles_of_several_widths(gemm, form, monkeypatch):
    """5 tiles of 288 columns, the last one of 136; enough rows for two threads."""
    monkeypatch.setenv("ONNXTRAIN_GEMM", gemm)
    for double in False, True:
        model, tensors = mlp("gelu_new", form, gated=True, ratio=0.0 if double else 0.5, double=double,
                             sizes=((3, 67), 40, 1288))
        _C.disable_kernels([])
        got, text = step(model, tensors, ["+tile_mlp"])
        assert "MlpGrad" in text
        _C.disable_kernels(["mlp_grad"])
        want, _ = step(model, tensors, ["+tile_mlp"])
        for one, other in zip(got, want, strict=True):
            assert (one - other).abs().max() <= (1e-13 if double else 1e-5) * other.abs().max()


def test_any_number_of_threads():
    model, tensors = mlp("silu", gated=True, ratio=0.5, sizes=((3, 67), 40, 1288))
    before, results = torch.get_num_threads(), []
    try:
        for threads in 1, 2, 3:
            torch.set_num_threads(threads)
            results.append(step(model, tensors, ["+tile_mlp"])[0])
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        for one, want in zip(got, results[0], strict=True):
            assert (one - want).abs().max() <= 1e-5 * want.abs().max()


def test_failing_allocations():
    model, tensors = mlp(gated=True)
    step(model, tensors, ["+tile_mlp"])  # what is allocated once a process
    failing_allocations(lambda: step(model, tensors, ["+tile_mlp"]), "MlpGrad")


def test_a_model_cannot_name_it():
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "abcdy"]
    graph = helper.make_graph([helper.make_node("MlpGrad", list("abcd"), ["y"], domain="ai.onnxtrain")], "g",
                              values[:4], values[4:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("ai.onnxtrain", 1)],
                              ir_version=10)
    with pytest.raises(ValueError, match="MlpGrad is an internal operator"):
        _C.Session(model.SerializeToString())
