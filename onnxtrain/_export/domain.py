"""The domain ai.onnxtrain: operators that ONNX lacks, as ops of a torch library and as schemas for torch.onnx
and checkers.

batch_norm hands out its batch statistics; ctc_loss has no reduction; grouped_mm, unlike torch's own, can be traced in
every dtype; matmul_bnb4 is traced alone, and becomes com.microsoft's MatMulBnb4; in_range hands its indices on, and
raises IndexError unless all are from 0 to below a limit (below any, where that is negative); gru_cell and lstm_cell are
torch's as one operator each, since a loop of them takes a while to trace; drawn_like fills memory of
another order of dimensions with random numbers (draws.py). Imported before anything is traced; translations.py says
what torch.onnx writes for them.
"""

from __future__ import annotations

import onnx
import torch
from torch import Tensor

from onnxtrain._torch import ctc_loss, grouped_mm

DOMAIN = "ai.onnxtrain"
DOMAIN_VERSION = 1
MICROSOFT = "com.microsoft"  # onnxruntime's operators; of version 1

library = torch.library.Library("onnxtrain", "DEF")
library.define("batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)")
library.define("ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
                "bool zero_infinity) -> Tensor")
library.define("gru_cell(Tensor input, Tensor state, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh) -> Tensor")
library.define("lstm_cell(Tensor input, Tensor hidden, Tensor state, Tensor w_ih, Tensor w_hh, Tensor? b_ih, "
               "Tensor? b_hh) -> (Tensor, Tensor)")
library.define("grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor")
library.define("drawn_like(Tensor x, str fill, float[] numbers, int[] order, bool dense, *, ScalarType dtype) -> "
               "Tensor")
library.define("in_range(Tensor x, SymInt limit) -> Tensor")
library.define("matmul_bnb4(Tensor a, Tensor b, Tensor absmax, int n, int k, int block_size, int quant_type, "
                "int grad_weight_dtype) -> Tensor")


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """As in torch, batch statistics of 16-bit tensors are not rounded to 16 bits."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    y = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    wide = x.to(_statistics_dtype(x))
    return y, wide.mean(axes), wide.var(axes, unbiased=False)


def _batch_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1], dtype=_statistics_dtype(x))
    return torch.empty_like(x), channels, torch.empty_like(channels)


def _gru_cell(input: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
              b_hh: Tensor | None) -> Tensor:
    return torch.gru_cell(input, state, w_ih, w_hh, b_ih, b_hh)


def _lstm_cell(input: Tensor, hidden: Tensor, state: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
               b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.lstm_cell(input, (hidden, state), w_ih, w_hh, b_ih, b_hh)


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
              zero_infinity: bool) -> Tensor:
    losses = ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    return losses.masked_fill(losses == torch.inf, 0) if zero_infinity else losses


def _ctc_loss_fake(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
                   zero_infinity: bool) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _in_range(x: Tensor, limit: int) -> Tensor:
    if x.numel() and (x.min() < 0 or 0 <= limit <= x.max()):
        raise IndexError(f"an index is below 0, or not below the limit {limit}")
    return x.clone()


def _drawn_like(x: Tensor, fill: str, numbers: list[float], order: list[int], dense: bool, *,
                dtype: torch.dtype) -> Tensor:
    """Numbers of a method as "normal_", in memory whose dimensions have this order, from the outermost on."""
    sizes = [x.shape[dim] for dim in order]
    memory = torch.empty([*sizes[:-1], sizes[-1] + (not dense)], dtype=dtype)[..., :sizes[-1]]
    drawn = memory.permute([order.index(dim) for dim in range(x.dim())])
    getattr(drawn, fill)(*(map(int, numbers) if fill == "random_" else numbers))
    return drawn.contiguous()


library.impl("drawn_like", _drawn_like, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::drawn_like", lambda x, *_, dtype: x.new_empty(x.shape, dtype=dtype),
                            lib=library)
library.impl("batch_norm", _batch_norm, "CompositeExplicitAutograd")
library.impl("gru_cell", _gru_cell, "CompositeExplicitAutograd")
library.impl("lstm_cell", _lstm_cell, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::gru_cell", lambda input, state, *_: torch.empty_like(state), lib=library)
torch.library.register_fake("onnxtrain::lstm_cell", lambda input, hidden, state, *_: (
    torch.empty_like(hidden), torch.empty_like(state)), lib=library)
library.impl("in_range", _in_range, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::in_range", lambda x, limit: torch.empty_like(x), lib=library)
torch.library.register_fake("onnxtrain::batch_norm", _batch_norm_fake, lib=library)


def _grouped_mm_fake(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


library.impl("grouped_mm", lambda x, w, ends: grouped_mm(x, w, ends), "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::grouped_mm", _grouped_mm_fake, lib=library)
torch.library.register_fake("onnxtrain::matmul_bnb4", lambda a, b, absmax, n, *_: a.new_empty(*a.shape[:-1], n),
                            lib=library)
library.impl("ctc_loss", _ctc_loss, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::ctc_loss", _ctc_loss_fake, lib=library)


_TENSORS = sorted(onnx.defs.get_schema("Identity", 14).type_constraints[0].allowed_type_strs)
_FLOATS = ["tensor(float16)", "tensor(float)", "tensor(double)", "tensor(bfloat16)"]
_INTEGERS, _INT64 = ["tensor(int32)", "tensor(int64)"], ["tensor(int64)"]


def _define(name: str, doc: str, inputs: str, outputs: str, types: dict[str, list[str]], attributes: str = "",
            domain: str = DOMAIN) -> None:
    """Registers the schema of an operator.

    Args:
        inputs, outputs: "x:T k:I", names with the names of their types.
        types: that each of these may be.
        attributes: "axis:INT mode:STRING! ...", names with members of OpSchema.AttrType; with a "!" required.
    """
    schema = onnx.defs.OpSchema

    def formal(text: str) -> list[onnx.defs.OpSchema.FormalParameter]:
        return [schema.FormalParameter(*each.split(":")) for each in text.split()]

    def attribute(text: str) -> onnx.defs.OpSchema.Attribute:
        own, kind = text.rstrip("!").split(":")
        return schema.Attribute(own, getattr(schema.AttrType, kind), own, required=text.endswith("!"))

    onnx.defs.register_schema(schema(
        name, domain, DOMAIN_VERSION, doc=doc, inputs=formal(inputs), outputs=formal(outputs),
        type_constraints=[(kind, allowed, kind) for kind, allowed in types.items()],
        attributes=[attribute(each) for each in attributes.split()]))


def _register_schemas() -> None:
    """onnxscript emits, and onnx.checker accepts, only operators that have a schema."""
    if onnx.defs.has("HardTanh", DOMAIN):
        return
    any_, floats = {"T": _TENSORS}, {"T": _FLOATS}
    _define("StopGradient", "Identity whose gradient is zero.", "x:T", "y:T", any_)
    _define("HardTanh", "Clip whose gradient at the bounds is zero.", "x:T min:T max:T", "y:T", any_)
    for name, operands, doc in (("Log1p", "x:T", "log(1 + x)"), ("Expm1", "x:T", "exp(x) - 1"),
                                ("Lgamma", "x:T", "log |gamma(x)|"), ("Digamma", "x:T", "Lgamma's derivative"),
                                ("Erfc", "x:T", "1 - Erf"), ("Erfinv", "x:T", "Erf's inverse"),
                                ("Logit", "x:T", "log(x / (1 - x))"),
                                ("Remainder", "x:T y:T", "As torch's: exact, with the sign of the divisor."),
                                ("Atan2", "y:T x:T", "The angle of (x, y)")):
        _define(name, doc, operands, "z:T", floats)
    of_axis = any_ | {"I": _INTEGERS}
    _define("TorchCumProd", "Running products along an axis.", "x:T axis:I", "y:T", of_axis,
            "exclusive:INT reverse:INT")
    _define("TorchTopK", "TopK with torch's choice among equals.", "x:T k:I", "values:T indices:J",
            of_axis | {"J": _INT64}, "axis:INT largest:INT sorted:INT")
    _define("GroupedMatMul", "Runs of rows, which end where `ends` says, each times its own matrix, which with transB "
            "is stored transposed.", "x:T w:T ends:I", "y:T", of_axis, "transB:INT")
    for name, updates in (("Gather", ""), ("GatherElements", ""), ("ScatterElements", "updates:T")):
        _define(f"Torch{name}", f"ONNX's {name}, whose negative indices do not count from the end.",
                f"x:T indices:I {updates}", "y:T", of_axis, "axis:INT" + " reduction:STRING" * bool(updates))
    _define("InRange", "Its indices, which must be at least 0, and below the limit unless the limit is negative.",
            "x:I limit:L", "y:I", {"I": _INTEGERS, "L": _INT64})
    _define("AdaptiveAveragePool", "Means over parts of each plane, as many as the sizes say, of cells [o in / out, "
            "(o + 1) in / out).", "x:T sizes:I", "y:T", any_ | {"I": _INT64})
    _define("GroupNorm", "GroupNormalization with a scale and a bias for each channel.", "x:T scale:T bias:T", "y:T",
            any_, "groups:INT! epsilon:FLOAT")
    _define("SearchSorted", "Where each value would stand in sorted rows; with right, behind what is equal.",
            "sorted:T x:T", "y:I", any_ | {"I": _INT64}, "right:INT")
    _define("CTCLoss", "The loss of each sample, by torch's rules.",
            "log_probs:T targets:I input_lengths:J target_lengths:K", "losses:T",
            any_ | dict.fromkeys("IJK", _INTEGERS), "blank:INT zero_infinity:INT")
    # quant_type is 0 for FP4 and 1 for NF4; weight_dtype what the weight is rounded to, by default that of A, and
    # grad_weight_dtype the same for the gradient, by default weight_dtype.
    _define("MatMulBnb4", "A times the transposed weight (N, K), of bitsandbytes' 4-bit codes, two a byte, of which "
            "block_size share a scale.", "A:T B:C absmax:S", "Y:T", floats | {"C": ["tensor(uint8)"], "S": _FLOATS},
            "K:INT! N:INT! block_size:INT! quant_type:INT! training_mode:INT transB:INT weight_dtype:INT "
            "grad_weight_dtype:INT", MICROSOFT)


_register_schemas()
