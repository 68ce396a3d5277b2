"""A fixed part of torch's own samples and error inputs, those of functions that an export writes anew: see opinfo.py."""

import pytest
import torch
from opinfo import of_operator, operators

FUNCTIONS = """
    angle atan2 clamp clamp_max clamp_min copysign cumprod digamma div.floor_rounding div.trunc_rounding erfinv
    expm1 fill floor_divide fmax fmin gather hypot index_add index_copy index_fill index_select lgamma linalg.vector_norm
    log1p logcumsumexp masked_scatter max.reduction_with_dim nn.functional.batch_norm
    nn.functional.binary_cross_entropy_with_logits nn.functional.celu nn.functional.conv3d nn.functional.cross_entropy
    nn.functional.embedding nn.functional.group_norm nn.functional.hardtanh nn.functional.instance_norm
    nn.functional.interpolate.bilinear nn.functional.layer_norm nn.functional.logsigmoid nn.functional.nll_loss
    nn.functional.multilabel_margin_loss nn.functional.pad.circular nn.functional.scaled_dot_product_attention
    nn.functional.softplus pow remainder round scatter scatter_add signbit sinc take_along_dim trunc xlogy
""".split()
COMPLEX = ["complex", "fft.rfft", "view_as_complex"]
OF_INTEGERS = ["div.floor_rounding", "floor_divide", "remainder", "xlogy", "copysign", "nn.functional.one_hot"]
REFUSED = ["complex", "gather", "index_add", "logcumsumexp", "masked_scatter", "nn.functional.embedding",
           "nn.functional.group_norm", "scatter"]


def results(name, dtype, samples, errors):
    torch.manual_seed(0)
    found = [r for op in operators([name]) for r in of_operator(op, dtype, samples, errors, limit=0)]
    assert found and {r.outcome for r in found} != {"skipped"}, f"no sample of {name}: {found}"
    wrong = [f"{r.kind} {r.sample}: {r.text}" for r in found if r.outcome == "different"]
    assert not wrong, "\n".join(wrong)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples(name):
    assert [r.text for r in results(name, torch.float32, 1, 0) if r.outcome == "torch"] == []


@pytest.mark.parametrize("name", ["bernoulli", "exponential", "multinomial", "randn_like", "nn.functional.dropout2d"])
def test_random_numbers_are_those_of_the_seed(name):
    assert {r.outcome for r in results(name, torch.float32, 3, 0)} == {"engine"}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_results(name):
    assert {r.outcome for r in results(name, torch.float32, 1, 0)} <= {"engine", "view"}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers(name):
    results(name, torch.int64, 1, 0)


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name):
    results(name, torch.float32, 0, 2)
