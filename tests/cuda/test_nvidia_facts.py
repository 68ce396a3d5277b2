"""What NVIDIA's toolchain says of cuda/, without a GPU; and that each of these checks finds what it is for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import facts
import pytest

needs_nvrtc = pytest.mark.skipif(not facts.nvrtc(), reason="tests/cuda/facts.py fetch nvrtc")
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
needs_headers = pytest.mark.skipif(not facts.includes(), reason="tests/cuda/facts.py fetch headers")


@needs_headers
def test_declarations_are_those_of_the_headers():
    assert not facts.check_headers(facts.includes())


@needs_headers
@pytest.mark.parametrize(("file", "old", "new", "message"), [
    ("cublas_lt.h", "DESC_AUX_LD = 12", "DESC_AUX_LD = 13", "another number: DESC_AUX_LD"),
    ("cublas_lt.h", "    float waves;\n", "    double waves;\n", "another size: heuristic"),
    ("cublas_lt.h", "int attribute, const void *value, size_t size);\n    int (*layout_create)",
     "int attribute, const void *value);\n    int (*layout_create)",
     "called otherwise: cublasLtMatmulDescSetAttribute"),
    ("cudnn_conv.h", "MATH_FMA = 3", "MATH_FMA = 2", "another number: MATH_FMA"),
    ("cudnn_conv.h", "    size_t memory;\n", "    int memory;\n", "another layout: performance"),
    ("cudnn_conv.h", "X(tensor_set, cudnnSetTensorNdDescriptor)", "X(tensor_set, cudnnSetFilterNdDescriptor)",
     "called otherwise: cudnnSetFilterNdDescriptor"),
    ("dnn_graph.h", "X(TYPE_BOOLEAN, 2)", "X(TYPE_BOOLEAN, 3)", "another number: DNN_TYPE_BOOLEAN"),
    ("dnn_graph.h", "int64_t n, const void *values);", "int n, const void *values);",
     "called otherwise: cudnnBackendSetAttribute"),
    ("nccl_api.h", "NCCL_MAX = 2", "NCCL_MAX = 3", "another number: NCCL_MAX"),
    ("nccl_api.h", "char bytes[128]", "char bytes[64]", "another size: nccl_id"),
    ("nccl_api.h", "int type, int root, void *comm", "int type, void *comm", "called otherwise: ncclBroadcast")])
def test_a_wrong_declaration_is_found(tmp_path, file, old, new, message):
    shutil.copytree(facts.ROOT / "cuda/libs", tmp_path / "libs")
    text = (tmp_path / "libs" / file).read_text()
    assert text.count(old) == 1
    (tmp_path / "libs" / file).write_text(text.replace(old, new))
    assert message in facts.check_headers(facts.includes(), tmp_path)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    built = subprocess.run([sys.executable, str(facts.ROOT / "cuda/emulate/build.py"),
                            str(facts.ROOT / "build/emulated/plain")], check=True, text=True, capture_output=True)
    return facts.generated_sources(Path(built.stdout.splitlines()[-1]))


def test_programs_generate_kernels_of_each_kind(sources):
    for part in ("ont_vector<float>", "ont_vector<uint16_t>", "double", "g.seed[0]", "% 7", "ont_bf16_to_float",
                 "ont_f16_to_float"):
        assert any(part in source.split("ont_fused")[1] for source in sources), part


def test_a_script_with_a_case_that_fails_is_an_error(emulated):
    """Else its kernels would be missed without a word."""
    with pytest.raises(RuntimeError, match="models.py nothing: .*KeyError"):
        facts.generated_sources(emulated, [("models.py", "nothing")])


@needs_nvrtc
def test_the_command_compiles_models_and_cases_too(monkeypatch, capsys):
    """And says how many kernels there are."""
    asked, compiled = [], []
    monkeypatch.setattr(facts, "generated_sources", lambda plugin, scripts: asked.extend(scripts) or ["a", "b", "c"])
    monkeypatch.setattr(facts, "check_generated", lambda library, sources: compiled.extend(sources) or [])
    assert not facts.generated(facts.ROOT, None) and compiled == ["a", "b", "c"]
    assert not facts.generated(facts.ROOT, 2) and len(compiled) == 5
    assert {script for script, _ in asked} == {"programs.py", "dropout.py", "models.py", "cases.py"}
    assert "3 of 3 distinct generated kernels" in (out := capsys.readouterr().out) and "2 of 3 distinct" in out


@needs_nvcc
def test_a_division_of_64_bits_is_found(tmp_path):
    (tmp_path / "one.cu").write_text("__global__ void one(long *p, long n) { *p /= n; }\n"
                                     "__global__ void other(long *p, int n) { *p += (int)*p / n + *p / 7; }\n")
    assert facts.divisions(facts.machine_code(tmp_path / "one.cu", tmp_path)) == {"one(long*, long)": ["div_s64"],
                                                                                  "other(long*, int)": []}


@needs_nvcc
def test_values_are_rounded_by_one_instruction(tmp_path):
    """To 16 bits: one value, and two at once, from compute capability 8.0 on."""
    (tmp_path / "one.cu").write_text('#include "kernels/mma.cuh"\n'
                                     "__global__ void one(const float *x, ont_bf16 *y, uint32_t *two)\n{\n"
                                     "    ont_store(y, x[0]);\n"
                                     "    two[0] = ont_pack<ont_bf16>(x[0], x[1]);\n"
                                     "    two[1] = ont_pack<ont_f16>(x[0], x[1]);\n}\n")
    subprocess.run(["nvcc", "-std=c++17", "-ptx", "-arch=sm_80", f"-I{facts.ROOT / 'cuda'}",
                    f"-I{facts.ROOT / 'csrc'}", str(tmp_path / "one.cu"), "-o", str(tmp_path / "one.ptx")], check=True)
    found = re.findall(r"cvt\.rn\.b?f16(?:x2)?\.f32", (tmp_path / "one.ptx").read_text())
    assert sorted(found) == ["cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"]


@needs_nvcc
def test_generated_dropout_divides_no_64_bits(sources):
    """A mask tells the compiler what the layout of torch's numbers divides by."""
    source = next(text for text in sources if "ull) | " in text.split("ont_fused")[1])
    assert not facts.divided_of_text(source)
    unknown = re.sub(r"\(g\.stream\[0\] & \d+ull\) \|", "g.stream[0] |", source)
    assert unknown != source and facts.divided_of_text(unknown)
