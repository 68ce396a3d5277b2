"""The table of operators has a descriptor for every opset in which ONNX has the operator."""

import onnx.defs

from onnxtrain import _C


def test_every_version_of_every_operator_that_we_have_is_covered():
    """No opset of ai.onnx in which an operator of ours has no descriptor."""
    since = {}
    for op in _C.operators():
        if op["domain"] == "":
            since[op["name"]] = min(op["since"], since.get(op["name"], 1000))
    first = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            first[schema.name] = min(schema.since_version, first.get(schema.name, 1000))
    late = {name: (version, first[name]) for name, version in since.items() if name in first and version > first[name]}
    assert not late, f"(ours, the first of the specification): {late}"
