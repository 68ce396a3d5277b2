"""Operators that torch.onnx translates otherwise have the values, slopes and dtypes of eager's."""

import torch
import torch.nn.functional as F
from test_edges import BINARY, FINITE, FIRST, SECOND, TIES, VALUES, agree
from torch import tensor


def test_shifts_of_unsigned_numbers():
    x = tensor([200, 7, 129, 0]).to(torch.uint8)
    agree({"left": lambda x: x << 1, "right": lambda x: x >> 4, "of a number": lambda x: 3 << (x & 3),
           "by each other": lambda x: (x >> (x & 3)) << (x & 1), "too far": lambda x: x << 9}, [x])


def test_truth_of_unsigned_numbers():
    x = tensor([[200, 0, 129], [1, 0, 2]]).to(torch.uint8)
    agree({"any": torch.any, "all": torch.all, "any of a row": lambda x: x.any(1),
           "all of two": lambda x: x.all((0, 1)), "bool": lambda x: x.bool().any(0), "none": lambda x: x[:0].any(),
           "none is not": lambda x: x[:0].all()}, [x])


def test_mixed_dtypes():
    wide = SECOND.double()
    agree({name: BINARY[name] for name in ("fmax", "fmin", "copysign", "hypot")}, [FIRST, wide])
    base, whole = tensor([0.5, 2.0, 3.0]), tensor([2, -1, 3])
    agree({"float64": lambda x: torch.pow(x, base.double()), "of int64": lambda x: torch.pow(whole, x),
           "of bfloat16": lambda x: torch.pow(base.bfloat16(), x), "of a number": lambda x: torch.pow(tensor(2), x),
           "of one float64": lambda x: torch.pow(tensor(0.3).double(), x), "whole": lambda x: torch.pow(x, whole),
           "one float64": lambda x: torch.pow(x, tensor(0.3).double())}, [base])


def test_infinity_beside_what_is_picked():
    """No product with zero picks an entry."""
    x = VALUES.repeat(6).view(3, 4, 5)
    agree({f"diagonal {offset} {dims}": lambda x, offset=offset, dims=dims: x.diagonal(offset, *dims)
           for offset in (0, 1, -1, 9) for dims in ((0, 1), (-2, -1), (2, 0))} | {
        "of a matrix": lambda x: torch.diag(x[0]), "traces": lambda x: torch.einsum("iij->ij", x[:, :3]),
        "of none": lambda x: x[:0].diagonal(0, 1, 2), "of truth": lambda x: (x > 0).diagonal(),
        "nearest": lambda x: F.interpolate(x, scale_factor=1.5),
        "exact": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=(0.7, 2.3), mode="nearest-exact")}, [x])


def test_running_product_of_one_row():
    agree({"cumprod": lambda x: x.cumprod(0), "of a number": lambda x: x[0].cumprod(0)}, [FINITE])


def test_norm_of_all_entries():
    agree({"kept": lambda x: torch.linalg.vector_norm(x, keepdim=True), "one": lambda x: torch.linalg.vector_norm(x, 3),
           "old": lambda x: torch.linalg.norm(x, keepdim=True), "frobenius": torch.linalg.norm}, [TIES])
