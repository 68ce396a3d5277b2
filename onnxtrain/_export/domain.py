"""The domain ai.onnxtrain: operators that ONNX lacks, as ops of a torch library and as schemas for torch.onnx
and checkers.

batch_norm hands out its batch statistics; ctc_loss has no reduction; grouped_mm, unlike torch's own, can be traced in
every dtype; matmul_bnb4 is traced alone, and becomes com.microsoft's MatMulBnb4; in_range hands its indices on, and
raises IndexError unless all are from 0 to below a limit (below any, where that is negative); drawn_like fills memory of
another order of dimensions with random numbers (draws.py). Imported before anything is traced; translations.py says
what torch.onnx writes for them.
"""

from __future__ import annotations

import onnx
import torch
from torch import Tensor

DOMAIN = "ai.onnxtrain"
DOMAIN_VERSION = 1
MICROSOFT = "com.microsoft"  # onnxruntime's operators; of version 1

library = torch.library.Library("onnxtrain", "DEF")
library.define("batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)")
library.define("ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
                "bool zero_infinity) -> Tensor")
library.define("gru_gates(Tensor input, Tensor hidden, Tensor state) -> Tensor")
library.define("lstm_gates(Tensor gates, Tensor state) -> (Tensor, Tensor)")
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


def gru_gates(input: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    """What a GRU cell makes of its two products, (batch, 3 x size) both, and of its state."""
    (reset, update, new), (of_reset, of_update, of_new) = input.chunk(3, 1), hidden.chunk(3, 1)
    kept = torch.sigmoid(of_update + update)
    new = torch.tanh(new + of_new * torch.sigmoid(of_reset + reset))
    return (state - new) * kept + new


def lstm_gates(gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What an LSTM cell makes of the sum of its two products, (batch, 4 x size), and of its state: h and c."""
    enter, forget, new, leave = gates.chunk(4, 1)
    state = torch.sigmoid(forget) * state + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(state), state


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
              zero_infinity: bool) -> Tensor:
    losses = torch._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
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
for name, gates in (("gru_gates", gru_gates), ("lstm_gates", lstm_gates)):
    library.impl(name, gates, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::gru_gates", lambda input, hidden, state: torch.empty_like(state), lib=library)
torch.library.register_fake("onnxtrain::lstm_gates",
                            lambda gates, state: (torch.empty_like(state), torch.empty_like(state)), lib=library)
library.impl("in_range", _in_range, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::in_range", lambda x, limit: torch.empty_like(x), lib=library)
torch.library.register_fake("onnxtrain::batch_norm", _batch_norm_fake, lib=library)


def _grouped_mm_fake(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


library.impl("grouped_mm", lambda x, w, ends: torch._grouped_mm(x, w, ends), "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::grouped_mm", _grouped_mm_fake, lib=library)
torch.library.register_fake("onnxtrain::matmul_bnb4", lambda a, b, absmax, n, *_: a.new_empty(*a.shape[:-1], n),
                            lib=library)
library.impl("ctc_loss", _ctc_loss, "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::ctc_loss", _ctc_loss_fake, lib=library)


def _register_schemas() -> None:
    """onnxscript emits, and onnx.checker accepts, only operators that have a schema."""
    if onnx.defs.has("HardTanh", DOMAIN):
        return
    schema = onnx.defs.OpSchema
    types = sorted(onnx.defs.get_schema("Identity", 14).type_constraints[0].allowed_type_strs)
    onnx.defs.register_schema(
        schema(
            "StopGradient", DOMAIN, DOMAIN_VERSION, doc="Identity whose gradient is zero.",
            inputs=[schema.FormalParameter("x", "T")], outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", types, "any tensor")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "HardTanh", DOMAIN, DOMAIN_VERSION, doc="Clip whose gradient at the bounds is zero.",
            inputs=[schema.FormalParameter(name, "T") for name in ("x", "min", "max")],
            outputs=[schema.FormalParameter("y", "T")], type_constraints=[("T", types, "any tensor")],
        )
    )
    floats = ["tensor(float16)", "tensor(float)", "tensor(double)", "tensor(bfloat16)"]
    for name, operands, doc in (("Log1p", "x", "log(1 + x)"), ("Expm1", "x", "exp(x) - 1"),
                                ("Lgamma", "x", "log |gamma(x)|"), ("Digamma", "x", "Lgamma's derivative"),
                                ("Erfc", "x", "1 - Erf"), ("Erfinv", "x", "Erf's inverse"),
                                ("Logit", "x", "log(x / (1 - x))"),
                                ("Remainder", "xy", "As torch's: exact, with the sign of the divisor."),
                                ("Atan2", "yx", "The angle of (x, y)")):
        onnx.defs.register_schema(
            schema(
                name, DOMAIN, DOMAIN_VERSION, doc=doc, inputs=[schema.FormalParameter(x, "T") for x in operands],
                outputs=[schema.FormalParameter("z", "T")], type_constraints=[("T", floats, "floats")],
            )
        )
    integers = ["tensor(int32)", "tensor(int64)"]
    onnx.defs.register_schema(
        schema(
            "TorchCumProd", DOMAIN, DOMAIN_VERSION, doc="Running products along an axis.",
            inputs=[schema.FormalParameter("x", "T"), schema.FormalParameter("axis", "I")],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", types, "any tensor"), ("I", integers, "integers")],
            attributes=[schema.Attribute(name, schema.AttrType.INT, "as CumSum's", required=False)
                        for name in ("exclusive", "reverse")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "TorchTopK", DOMAIN, DOMAIN_VERSION, doc="TopK with torch's choice among equals.",
            inputs=[schema.FormalParameter("x", "T"), schema.FormalParameter("k", "I")],
            outputs=[schema.FormalParameter("values", "T"), schema.FormalParameter("indices", "J")],
            type_constraints=[("T", types, "any tensor"), ("I", integers, "integers"),
                              ("J", ["tensor(int64)"], "positions")],
            attributes=[schema.Attribute(name, schema.AttrType.INT, "as TopK's", required=False)
                        for name in ("axis", "largest", "sorted")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "GroupedMatMul", DOMAIN, DOMAIN_VERSION,
            doc="Runs of rows, which end where `ends` says, each times its own matrix.",
            inputs=[schema.FormalParameter(name, kind) for name, kind in (("x", "T"), ("w", "T"), ("ends", "I"))],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", types, "any tensor"), ("I", integers, "integers")],
            attributes=[schema.Attribute("transB", schema.AttrType.INT, "matrices are stored transposed",
                                         required=False)],
        )
    )
    axis = schema.Attribute("axis", schema.AttrType.INT, "as ONNX's", required=False)
    reduction = schema.Attribute("reduction", schema.AttrType.STRING, "as ONNX's", required=False)
    for name, more, attributes in (("Gather", (), [axis]), ("GatherElements", (), [axis]),
                                   ("ScatterElements", ("updates",), [axis, reduction])):
        onnx.defs.register_schema(
            schema(
                f"Torch{name}", DOMAIN, DOMAIN_VERSION,
                doc=f"ONNX's {name}, whose negative indices do not count from the end.",
                inputs=[schema.FormalParameter("x", "T"), schema.FormalParameter("indices", "I"),
                        *(schema.FormalParameter(other, "T") for other in more)],
                outputs=[schema.FormalParameter("y", "T")],
                type_constraints=[("T", types, "any tensor"), ("I", integers, "integers")],
                attributes=attributes,
            )
        )
    onnx.defs.register_schema(
        schema(
            "InRange", DOMAIN, DOMAIN_VERSION,
            doc="Its indices, which must be at least 0, and below the limit unless the limit is negative.",
            inputs=[schema.FormalParameter("x", "I"), schema.FormalParameter("limit", "L")],
            outputs=[schema.FormalParameter("y", "I")],
            type_constraints=[("I", integers, "integers"), ("L", ["tensor(int64)"], "a number")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "AdaptiveAveragePool", DOMAIN, DOMAIN_VERSION,
            doc="Means over parts of each plane, as many as the sizes say, of cells [o in / out, (o + 1) in / out).",
            inputs=[schema.FormalParameter("x", "T"), schema.FormalParameter("sizes", "I")],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", types, "any tensor"), ("I", ["tensor(int64)"], "an integer for each spatial dim")],
        )
    )
    onnx.defs.register_schema(
        schema(
            "GroupNorm", DOMAIN, DOMAIN_VERSION, doc="GroupNormalization with a scale and a bias for each channel.",
            inputs=[schema.FormalParameter(name, "T") for name in ("x", "scale", "bias")],
            outputs=[schema.FormalParameter("y", "T")], type_constraints=[("T", types, "any tensor")],
            attributes=[schema.Attribute("groups", schema.AttrType.INT, "how many", required=True),
                        schema.Attribute("epsilon", schema.AttrType.FLOAT, "as ONNX's", required=False)],
        )
    )
    onnx.defs.register_schema(
        schema(
            "SearchSorted", DOMAIN, DOMAIN_VERSION, doc="Where each value would stand in sorted rows.",
            inputs=[schema.FormalParameter("sorted", "T"), schema.FormalParameter("x", "T")],
            outputs=[schema.FormalParameter("y", "I")],
            type_constraints=[("T", types, "any tensor"), ("I", ["tensor(int64)"], "positions")],
            attributes=[schema.Attribute("right", schema.AttrType.INT, "behind what is equal", required=False)],
        )
    )
    lengths = (("log_probs", "T"), ("targets", "I"), ("input_lengths", "J"), ("target_lengths", "K"))
    onnx.defs.register_schema(
        schema(
            "CTCLoss", DOMAIN, DOMAIN_VERSION, doc="The loss of each sample, by torch's rules.",
            inputs=[schema.FormalParameter(name, kind) for name, kind in lengths],
            outputs=[schema.FormalParameter("losses", "T")],
            type_constraints=[("T", types, "any tensor"), *((kind, integers, "integers") for kind in "IJK")],
            attributes=[schema.Attribute(name, schema.AttrType.INT, "as torch's", required=False)
                        for name in ("blank", "zero_infinity")],
        )
    )
    attributes = [schema.Attribute(name, schema.AttrType.INT, doc, required=name in ("K", "N", "block_size",
                                                                                     "quant_type"))
                  for name, doc in (("K", "columns of the weight"), ("N", "rows of the weight"),
                                    ("block_size", "elements that share a scale"), ("quant_type", "0: FP4, 1: NF4"),
                                    ("training_mode", "as onnxruntime's"), ("transB", "0: the weight as it is"),
                                    ("weight_dtype", "the weight is rounded to it; by default that of A"),
                                    ("grad_weight_dtype", "the same for the gradient; by default weight_dtype"))]
    onnx.defs.register_schema(
        schema(
            "MatMulBnb4", MICROSOFT, 1, doc="A times the transposed weight (N, K), of bitsandbytes' 4-bit codes.",
            inputs=[schema.FormalParameter(name, kind) for name, kind in (("A", "T"), ("B", "C"), ("absmax", "S"))],
            outputs=[schema.FormalParameter("Y", "T")],
            type_constraints=[("T", floats, "floats"), ("C", ["tensor(uint8)"], "two codes a byte"),
                              ("S", floats, "float, or the type of A")],
            attributes=attributes,
        )
    )


_register_schemas()
