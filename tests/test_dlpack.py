"""The DLPack structs of csrc/py/dlpack.h against torch's own header, and exchange with torch in both directions."""

import gc
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain import _C

ROOT = Path(__file__).resolve().parents[1]

# our struct, torch's; then our field, torch's
STRUCTS = [
    ("dlpack_version", "DLPackVersion", [("major", "major"), ("minor", "minor")]),
    ("dlpack_device", "DLDevice", [("type", "device_type"), ("id", "device_id")]),
    ("dlpack_dtype", "DLDataType", [("code", "code"), ("bits", "bits"), ("lanes", "lanes")]),
    ("dlpack_tensor", "DLTensor",
     [(f, f) for f in ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")]),
    ("dlpack_managed", "DLManagedTensorVersioned",
     [("version", "version"), ("manager", "manager_ctx"), ("deleter", "deleter"), ("flags", "flags"),
      ("tensor", "dl_tensor")]),
    ("dlpack_managed_legacy", "DLManagedTensor",
     [("tensor", "dl_tensor"), ("manager", "manager_ctx"), ("deleter", "deleter")]),
    ("dlpack_exchange_api", "DLPackExchangeAPI",
     [("version", "header.version"), ("previous", "header.prev_api"), ("allocate", "managed_tensor_allocator"),
      ("managed_from_object", "managed_tensor_from_py_object_no_sync"),
      ("managed_to_object", "managed_tensor_to_py_object_no_sync"),
      ("tensor_from_object", "dltensor_from_py_object_no_sync"), ("current_stream", "current_work_stream")]),
]


def test_offsets_equal_those_of_torch(tmp_path):
    lines = ['#include "py/dlpack.h"', "#include <ATen/dlpack.h>", "#include <stddef.h>"]
    for ours, theirs, fields in STRUCTS:
        lines.append(f'_Static_assert(sizeof({ours}) == sizeof({theirs}), "{ours}");')
        lines += [f'_Static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "{ours}.{a}");' for a, b in fields]
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(lines))
    include = Path(torch.__file__).parent / "include"
    subprocess.run(["cc", "-std=c11", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_paths()['include']}",
                    f"-I{include}", str(source)], check=True)


def session(op_type="Neg", dtype=TensorProto.FLOAT):
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"])], "g",
                              [helper.make_tensor_value_info("x", dtype, None)],
                              [helper.make_tensor_value_info("y", dtype, None)])
    return _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())


@pytest.mark.parametrize("x", [
    torch.arange(24.0).view(4, 6).t(), torch.arange(24.0)[5:], torch.arange(24.0).view(2, 3, 4)[:, ::2, 1:],
    torch.ones(3, 1).expand(3, 4), torch.zeros(0, 3), torch.tensor(2.0), torch.arange(4.0, requires_grad=True),
], ids=["transposed", "offset", "sliced", "expanded", "empty", "scalar", "requires_grad"])
def test_layouts_come_in_as_they_are(x):
    (y,), _ = session().forward([x], b"\0")
    assert torch.equal(y, -x) and y.is_contiguous()


def test_negative_view_is_refused_or_read_right():
    x = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert x.is_neg()
    with pytest.raises(TypeError, match="resolve_neg"):
        session().forward([x], b"\0")


@pytest.mark.parametrize("z", [torch.tensor([1 + 2j, 3 + 4j]), torch.tensor(1 + 2j)], ids=["vector", "number"])
def test_conjugate_view_is_refused(z):
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.COMPLEX64, None)],
                              [helper.make_tensor_value_info("y", TensorProto.COMPLEX64, None)])
    identity = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    (y,), _ = identity.forward([z], b"\0")
    assert torch.equal(y, z)
    assert z.conj().is_conj()
    with pytest.raises(TypeError, match="resolve_conj"):
        identity.forward([z.conj()], b"\0")


@pytest.mark.parametrize("x, match", [
    (torch.ones(2).to_sparse(), None), (torch.ones(2, device="meta"), None), (3.0, "torch.Tensor"),
    (None, "torch.Tensor"), (torch.ones(2, dtype=torch.float64), "double"),
], ids=["sparse", "meta", "number", "none", "dtype"])
def test_what_is_no_dense_cpu_tensor_of_that_dtype_is_refused(x, match):
    with pytest.raises((TypeError, BufferError, RuntimeError, ValueError), match=match):
        session().forward([x], b"\0")


def test_outputs_live_on_their_own_in_every_order():
    s = session()
    live = _C.live_blocks()
    outputs = [s.forward([torch.full((100,), float(i))], b"\0")[0][0] for i in range(4)]
    view = outputs[1][10:20]
    del s
    for i in (2, 0, 3, 1):
        assert outputs[i][0] == -i
        outputs[i] = None
        gc.collect()
    assert view.tolist() == [-1.0] * 10
    del view
    gc.collect()
    assert _C.live_blocks() < live, "session, pool and blocks are gone"


FALLBACK = """
import sys
import torch
del torch.Tensor.__dlpack_c_exchange_api__  # a torch without it
from onnx import TensorProto, helper
from onnxtrain import _C
import torch.utils.dlpack as dlpack

assert not _C.build_info()["dlpack_exchange"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g",
                          [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
                          [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
session = _C.Session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
take = dlpack.from_dlpack

def taken_then_fails(capsule):
    take(capsule)
    raise RuntimeError("behind it")

def fails(capsule):
    raise RuntimeError("before it")

x = torch.arange(300_000.0)
for broken in (taken_then_fails, fails):
    for _ in range(5):
        dlpack.from_dlpack = broken
        try:
            session.forward([x], b"\\0")
            sys.exit("no error")
        except RuntimeError:
            pass
        dlpack.from_dlpack = take
        (y,), _ = session.forward([x], b"\\0")
        (z,), _ = session.forward([x * 2], b"\\0")
        assert torch.equal(y, -x) and torch.equal(z, -2 * x), "one block for two results"
        del y, z
        assert session.stats()["pool_live_bytes"] == 0, session.stats()
"""


def test_a_block_goes_back_once_where_torch_fails_to_take_it():
    done = subprocess.run([sys.executable, "-c", FALLBACK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
