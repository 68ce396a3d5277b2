"""The domain ai.onnxtrain: operators that ONNX lacks, as ops of a torch library and as schemas for exporters and checkers.

stop_gradient is a barrier for gradients; batch_norm hands out its batch statistics. Imported before anything is traced;
translations.py says what the default exporter writes for them, register_symbolics() what the TorchScript exporter does.
"""

from __future__ import annotations

import onnx
import torch
from torch import Tensor

DOMAIN = "ai.onnxtrain"
DOMAIN_VERSION = 1

_library = torch.library.Library("onnxtrain", "DEF")
_library.define("batch_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)")
_library.define("stop_gradient(Tensor x) -> Tensor")


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    y = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    return y, x.mean(axes), x.var(axes, unbiased=False)


def _batch_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.new_empty(x.shape[1])
    return torch.empty_like(x), channels, torch.empty_like(channels)


_library.impl("batch_norm", _batch_norm, "CompositeExplicitAutograd")
_library.impl("stop_gradient", lambda x: x.detach().clone(), "CompositeExplicitAutograd")
torch.library.register_fake("onnxtrain::batch_norm", _batch_norm_fake, lib=_library)
torch.library.register_fake("onnxtrain::stop_gradient", torch.empty_like, lib=_library)


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


_register_schemas()


def register_symbolics(opset: int) -> None:
    """The same for the TorchScript exporter, which keeps one table for the process."""
    from torch.onnx import register_custom_op_symbolic, symbolic_helper

    def stop_gradient(g, x):
        return g.op(f"{DOMAIN}::StopGradient", x).setType(x.type())

    @symbolic_helper.parse_args("v", "v", "v", "f")
    def batch_norm(g, x, weight, bias, eps):
        channels = g.op("Shape", x, start_i=1, end_i=2)
        one, zero = (
            g.op("CastLike", g.op("ConstantOfShape", channels, value_t=torch.tensor([v])), x) for v in (1.0, 0.0)
        )
        weight = one if weight.node().mustBeNone() else weight
        bias = zero if bias.node().mustBeNone() else bias
        return g.op(
            "BatchNormalization", x, weight, bias, zero, one, epsilon_f=eps, momentum_f=0.0,
            training_mode_i=1, outputs=3,
        )

    register_custom_op_symbolic("onnxtrain::stop_gradient", stop_gradient, opset)
    register_custom_op_symbolic("onnxtrain::batch_norm", batch_norm, opset)
