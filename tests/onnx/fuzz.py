"""Mutation fuzz of the loader: a crash, a hang or an answer that is no proper error is a failure.

    python tests/onnx/fuzz.py --count 10000 [--seed N] [--target core|loader] [--only INDEX]

`core` feeds mutants to onnxtrain._C in a child process: load, build a program, run forward and backward. `loader` feeds
them to loader_check.c under sanitizers: load, write, load again. Each mutant follows from seed and index, and from the
models that it is made of: those of loader_models.py and, for `core`, those of tests/ops and of the onnx wheel's backend
suite.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import os
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import loader_build
import loader_models
import numpy as np
import onnx
from onnx import numpy_helper

EXTREMES = [0, 1, -1, 2, 3, 7, 64, 255, 4096, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]
PROPER = {"OK", "EINVAL", "ETYPE", "EINDEX", "EUNSUPPORTED", "ENOMEM"}
# A message says where: a name in quotes, or a part of the file and the byte.
PLACE = re.compile(r"'|too large for the fuzz|^E\w+ model: ")
TIMEOUT = 30.0
LARGEST = 8192  # bytes of a model that mutants are made of
MOST_FAILURES = 20  # then it stops: a child that cannot even start fails on every mutant


# ---- mutation ----


def mutate_bytes(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 2:
            del out[at : at + rng.choice([1, 2, 8, 64])]
        elif kind == 3:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice([1, 2, 8])))
        elif kind == 4:
            out[at:at] = out[at : at + rng.choice([4, 32, 256])]
        elif kind == 5:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            out[at : at + 32] = other[start : start + 32]
        else:
            del out[at:]
        if not out:
            break
    return bytes(out)


def messages(message) -> list:
    found = [message]
    for field, content in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for item in content if field.is_repeated else [content]:
                found += messages(item)
    return found


def random_scalar(rng: random.Random, field, names: list[str]):
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        text = rng.choice([*names, "", "x" * 300, "\u00e9"])
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5])
    if field.type == field.TYPE_ENUM:
        return rng.choice(list(field.enum_type.values_by_number))
    small = field.type == field.TYPE_INT32
    unsigned = field.type == field.TYPE_UINT64
    value = rng.choice(EXTREMES + list(range(24)))
    return abs(value) if unsigned else max(-(2**31), min(2**31 - 1, value)) if small else value


def mutate_field(rng: random.Random, message, names: list[str]) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.type == field.TYPE_MESSAGE:
        if not field.is_repeated:
            if message.HasField(field.name) and rng.random() < 0.5:
                message.ClearField(field.name)
            else:
                getattr(message, field.name).SetInParent()
            return
        items = getattr(message, field.name)
        kind = rng.randrange(4)
        if kind == 0 and len(items):
            del items[rng.randrange(len(items))]
        elif kind == 1 and len(items):
            items.add().CopyFrom(items[rng.randrange(len(items))])
        elif kind == 2 and len(items) > 1:
            order = list(items)
            rng.shuffle(order)
            copies = [type(item).FromString(item.SerializeToString()) for item in order]
            del items[:]
            items.extend(copies)
        else:
            items.add()
    elif field.is_repeated:
        items = getattr(message, field.name)
        if len(items) and rng.random() < 0.7:
            if rng.random() < 0.5:
                items[rng.randrange(len(items))] = random_scalar(rng, field, names)
            else:
                del items[rng.randrange(len(items))]
        else:
            items.append(random_scalar(rng, field, names))
    else:
        setattr(message, field.name, random_scalar(rng, field, names))


def mutate_model(rng: random.Random, data: bytes, operators: list[str]) -> bytes:
    model = onnx.ModelProto.FromString(data)
    everything = messages(model)
    used = {name for m in everything if isinstance(m, onnx.NodeProto) for name in [*m.input, *m.output]}
    names = sorted(used | {"own", "ai.onnx"})
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        target = rng.choice(everything)
        kind = rng.random()
        if isinstance(target, onnx.NodeProto) and kind < 0.4:
            if kind < 0.15:
                target.op_type = rng.choice(operators)
            elif kind < 0.3 and len(target.input):
                target.input[rng.randrange(len(target.input))] = rng.choice([*names, ""])
            else:
                target.input.append(rng.choice([*names, ""]))
        else:
            mutate_field(rng, target, names + operators[:4])
    return model.SerializeToString()


def mutate_attribute(rng: random.Random, node) -> None:
    attribute = rng.choice(node.attribute)
    number = rng.choice([*range(-4, 10), *EXTREMES])
    if rng.random() < 0.1:
        node.attribute.remove(attribute)
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = number
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5])
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = rng.choice([b"", b"none", b"mean", b"NOTSET", b"SAME_UPPER", b"VALID", b"reverse", b"linear",
                                  b"\xff"])
    elif attribute.type == onnx.AttributeProto.INTS:
        kind = rng.randrange(3)
        if kind and len(attribute.ints):
            attribute.ints[rng.randrange(len(attribute.ints))] = number
        elif not kind and len(attribute.ints):
            del attribute.ints[-1]
        else:
            attribute.ints.append(number)


def mutate_dims(rng: random.Random, graph_input) -> None:
    dims = graph_input.type.tensor_type.shape.dim
    kind = rng.randrange(4)
    if kind == 0 and len(dims):
        del dims[rng.randrange(len(dims))]
    elif kind == 1 or not len(dims):
        dims.add().dim_value = rng.randrange(4)
    else:
        dims[rng.randrange(len(dims))].dim_value = rng.choice([0, 1, 2, 3, 5, 33, 257])


def mutate_constant(rng: random.Random, tensor) -> None:
    array = numpy_helper.to_array(tensor).copy()
    if array.dtype.kind not in "iuf" or not array.size:
        return
    at = rng.randrange(array.size)
    if array.dtype.kind == "f":
        array.flat[at] = rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5])
    else:
        bounds = np.iinfo(array.dtype)
        array.flat[at] = max(bounds.min, min(bounds.max, rng.choice([*range(-4, 10), *EXTREMES])))
    if array.ndim == 1 and rng.random() < 0.2:
        array = rng.choice([array[:-1], np.concatenate([array, array[:1]])])
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def mutate_meaning(rng: random.Random, data: bytes) -> bytes:
    """A well-formed model whose attributes, sizes, dtypes, constants and operands do not go together: for the core
    behind the
    loader."""
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    names = sorted({name for node in graph.node for name in [*node.input, *node.output]})
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.randrange(6)
        node = rng.choice(graph.node) if graph.node else None
        dense = [i for i in graph.input if i.type.HasField("tensor_type")]
        if kind <= 1 and node is not None and len(node.attribute):
            mutate_attribute(rng, node)
        elif kind == 2 and dense:
            mutate_dims(rng, rng.choice(dense))
        elif kind == 3 and len(graph.initializer):
            mutate_constant(rng, rng.choice(graph.initializer))
        elif kind == 4 and dense:
            rng.choice(dense).type.tensor_type.elem_type = rng.choice([1, 11, 7, 6, 9, 2, 10, 16])
        elif node is not None and len(node.input):
            node.input[rng.randrange(len(node.input))] = rng.choice([*names, ""])
    for output in graph.output:  # stated types would only be found to differ
        output.ClearField("type")
    return model.SerializeToString()


def mutant(seed: int, index: int, groups: list[list[bytes]], operators: list[str]) -> bytes:
    rng = random.Random(f"{seed}:{index}")
    bases = rng.choice(groups)
    base = rng.choice(bases)
    if bases is not groups[0] and rng.random() < 0.7:
        return mutate_meaning(rng, base)
    if rng.random() < 0.65:
        base = mutate_model(rng, base, operators)
        if rng.random() < 0.8:
            return base
    return mutate_bytes(rng, base, bases)


# ---- what mutants are made of ----


def operator_models() -> list[bytes]:
    """The one-node models of tests/ops: the CASES of every file there."""
    folder = loader_build.ROOT / "tests" / "ops"
    sys.path[:0] = [str(folder), str(folder.parent)]
    import harness

    found = {}
    for path in sorted(folder.glob("test_*.py")):
        for case in getattr(importlib.import_module(path.stem), "CASES", ()):
            if isinstance(case, harness.Case):
                found[str(case)] = harness.model_of(case, harness._arrays(case, np.float32))
    return [data for data in found.values() if len(data) <= LARGEST]


def node_models() -> list[bytes]:
    """The models of the backend suite that the onnx wheel ships, all operators of ONNX among them."""
    import onnx.backend.test.loader

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        models = [case.model for case in onnx.backend.test.loader.load_model_tests(kind="node")]
    return [data for data in (model.SerializeToString() for model in models if model) if len(data) <= LARGEST]


@functools.cache
def groups_of(target: str) -> tuple[list[list[bytes]], list[str]]:
    """Groups of models, each as likely as another, and the names of the operators in them."""
    groups = [[make().SerializeToString() for make in loader_models.ALL.values()]]
    if target == "core":
        groups += [operator_models(), node_models()]
    operators = {node.op_type for group in groups for data in group
                 for node in onnx.ModelProto.FromString(data).graph.node}
    return groups, sorted(operators)


# ---- the child of target "core" ----


def make_tensor(torch, dtype: str, dims, symbols: dict):
    sizes = [d if isinstance(d, int) and d >= 0 else symbols.setdefault(d, 2) for d in dims or ()]
    count = 1
    for size in sizes:
        count *= size
    if count > 1 << 16:
        raise ValueError("too large for the fuzz")
    if dtype.startswith("float8"):
        dtype = dtype.replace("float8", "float8_") + ("fnu" if dtype.endswith("e8m0") else "")
    carriers = {"int4": "int8", "int2": "int8", "uint4": "uint8", "uint2": "uint8", "float4e2m1": "uint8",
                "float6e2m3": "uint8", "float6e3m2": "uint8"}
    kind = getattr(torch, {"float": "float32", "double": "float64", **carriers}.get(dtype, dtype))
    return torch.randn(sizes).to(kind) if kind.is_floating_point else torch.randint(0, 2, sizes).to(kind)


def exercise(torch, core, data: bytes) -> None:
    session = core.Session(data)
    session.text()
    symbols: dict = {}
    tensors = [make_tensor(torch, dtype, dims, symbols) for _, dtype, dims in session.inputs]
    mask = bytes(t.is_floating_point() and t.element_size() > 1 for t in tensors)
    outputs, run = session.forward(tensors, mask, 1)
    outputs = [t for o in outputs if o is not None for t in (o if isinstance(o, list) else [o])]
    session.text("program")
    if run is None:
        return
    saved = [tensors[i] for i in run.saved_inputs] + [outputs[i] for i in run.saved_outputs]
    grads = [torch.ones_like(o) if d else None for o, d in zip(outputs, run.differentiable, strict=True)]
    run.backward(saved, grads)


def core_worker() -> None:
    import torch

    sys.path.append(str(loader_build.ROOT))  # last: an installed onnxtrain comes first
    from onnxtrain import _C as core

    torch.set_num_threads(2)
    if "asan" not in os.environ.get("LD_PRELOAD",
                                    ""):  # that one reserves terabytes of addresses, and has its own limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
    kinds = [(core.UnsupportedError, "EUNSUPPORTED"), (IndexError, "EINDEX"), (UnicodeError, "UNICODE"),
             (ValueError, "EINVAL"),
             (TypeError, "ETYPE"), (MemoryError, "ENOMEM"), (Exception, "EINTERNAL")]
    while header := sys.stdin.buffer.read(8):
        data = sys.stdin.buffer.read(int.from_bytes(header, "little"))
        answer = "OK "
        try:
            exercise(torch, core, data)
        except Exception as error:  # noqa: BLE001  sorted below: nothing may be swallowed
            name = next(name for kind, name in kinds if isinstance(error, kind))
            answer = f"{name} {error!s}".replace("\n", " ").replace("\r", " ")
        print(answer, flush=True)


# ---- driving a child ----


class Child:
    def __init__(self, command: list[str], environment: dict[str, str]):
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        env=environment)

    def ask(self, data: bytes) -> str | None:
        """The child's line, or None where it died or took too long."""
        try:
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = b""
        end = time.monotonic() + TIMEOUT
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                return None
            line += chunk
        return line.decode(errors="replace").strip()

    def stop(self, patience: float) -> str:
        """How it ended, and the end of what it wrote to stderr."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = "no answer in time" if self.process.wait() else 0
        self.errors.seek(0)
        return f"exit status {code}\n" + self.errors.read().decode(errors="replace")[-3000:]


def start(target: str) -> Child:
    limits = "allocator_may_return_null=1:max_allocation_size_mb=2048"
    if target == "core":  # the interpreter leaks by design
        environment = {**os.environ, "ASAN_OPTIONS": limits + ":detect_leaks=0"}
        return Child([sys.executable, str(Path(__file__).resolve()), "--worker"], environment)
    program = loader_build.build(loader_build.ROOT / "build/loader_check")
    return Child([str(program), "stream"], {**os.environ, "ASAN_OPTIONS": limits})


def fuzz(target: str, seed: int, indices: range, keep: Path | None = None) -> tuple[collections.Counter, list[str]]:
    """Counts of answers, and one text a failure."""
    groups, operators = groups_of(target)
    counts: collections.Counter = collections.Counter()
    failures = []
    child = start(target)
    for index in indices:
        data = mutant(seed, index, groups, operators)
        answer = child.ask(data)
        name = answer.split()[0] if answer else "DIED"
        counts[name] += 1
        if name in PROPER and (name in ("OK", "ENOMEM") or PLACE.search(answer)):
            continue
        place = (keep or Path(tempfile.gettempdir())) / f"mutant-{seed}-{index}.onnx"
        place.write_bytes(data)
        failures.append(f"seed {seed} index {index} ({place}): {answer or child.stop(0.5)}")
        print(failures[-1], flush=True)
        if len(failures) >= MOST_FAILURES:
            failures.append(f"stopped after {MOST_FAILURES} failures")
            break
        if not answer:
            child = start(target)
    end = child.stop(TIMEOUT)
    if child.process.returncode and len(failures) <= MOST_FAILURES:
        failures.append(f"seed {seed}: at its end the child gave {end}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", type=int, help="one index")
    parser.add_argument("--target", choices=["core", "loader"], default="core")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        core_worker()
        return 0
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    indices = range(options.count) if options.only is None else range(options.only, options.only + 1)
    counts, failures = fuzz(options.target, seed, indices)
    print(f"{sum(counts.values())} mutants, {len(failures)} failures: "
          + ", ".join(f"{name} {n}" for name, n in counts.most_common()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
