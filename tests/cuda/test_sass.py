"""What ptxas and nvdisasm say of kernels is read and counted; and what is worse than in the tables is found."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import flash
import pytest
import sass
import torch
from facts import ROOT
from sass import Instance, Kernel

from onnxtrain import _C

needs_compiler = pytest.mark.skipif(not shutil.which("nvcc") or not sass.tool("nvdisasm"),
                                    reason="nvcc, or tests/cuda/facts.py fetch disassembler")
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4plusIfEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z4plusIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 512 bytes smem, 384 bytes cmem[0]
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function '_Z4plusIdEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z4plusIdEvPT_
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 384 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4plusIdEvPT_' for 'sm_80'
ptxas info    : Used 255 registers, used 1 barriers, 384 bytes cmem[0]
"""
LISTING = """
.text._Z1kv:
        /*0000*/                   MOV R1, R2 ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/              @P0 BRA `(.L_x_1) ;
        /*0040*/                   IMAD R1, R2, R3, R4 ;
        /*0050*/                   MUFU.EX2 R1, R1 ;
        /*0060*/                   IADD3 R1, R2, R3, RZ ;
.L_x_1:
        /*0070*/                   BSSY B0, `(.L_x_3) ;
        /*0080*/             @!P1 BRA `(.L_x_2) ;
        /*0090*/                   MUFU.RCP R1, R1 ;
        /*00a0*/                   BSYNC B0 ;
.L_x_2:
        /*00b0*/                   MUFU.EX2 R1, R1 ;
        /*00c0*/                   MUFU.EX2 R1, R1 ;
        /*00c8*/                   MUFU.EX2 R1, R1 ;
.L_x_3:
        /*00d0*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*00e0*/                   STS.64 [R1], R4 ;
        /*00f0*/              @P2 BRA `(.L_x_0) ;
        /*0100*/                   EXIT ;
.L_x_4:
        /*0110*/                   BRA `(.L_x_4);
"""


def test_the_usual_way_through_a_loop_is_counted():
    (code,) = sass.kernels_of(LISTING).values()
    assert len(code.text) == 19 and sass.loops(code) == [(1, 16)]  # not the padding behind the end
    loop = sass.count(code, 64)
    assert loop == sass.Loop(scores=64, instructions=14, hmma=1, mufu=4, conversions=0, shared=6, global16=1, local=0)


def test_a_kernel_without_such_a_loop_is_an_error():
    (code,) = sass.kernels_of(LISTING.replace("HMMA", "FFMA")).values()
    with pytest.raises(ValueError, match="no loop"):
        sass.count(code, 64)


def test_the_unit_that_is_busy_longest_is_counted():
    loop = sass.Loop(1024, 400, 64, 32, 16, 100, 2, 0)
    assert sass.cycles(loop) == pytest.approx(64 / 0.63)
    assert sass.cycles(loop._replace(instructions=1000)) == 250
    assert sass.cycles(loop._replace(mufu=70)) == 140


def test_the_table_has_every_loop_and_is_read_as_it_is_written(tmp_path):
    known = sass.read_table()
    assert set(known) == set(sass.LOOPS) and all(loop.scores == sass.LOOPS[name][1] for name, loop in known.items())
    sass.write_table(known, tmp_path / "loops.tsv")
    assert sass.read_table(tmp_path / "loops.tsv") == known and not sass.worse(known, known)


def test_a_slower_loop_is_found():
    known = sass.read_table()
    name = next(iter(known))
    for worse in (known[name]._replace(instructions=2 * known[name].instructions, hmma=2 * known[name].hmma),
                  known[name]._replace(local=known[name].local + 1)):
        (found,) = sass.worse({**known, name: worse}, known)
        assert found.startswith(name)
    assert len(sass.worse({}, known)) == len(known)


def test_loops_are_those_of_the_sources():
    """Tensor-core instructions of a pass are those that the sizes of the tiles give."""
    for name, loop in sass.read_table().items():
        kernel = re.match(r"\w+", name)[0]
        products = {"flash_mma_kernel": 2, "flash_mma_dq_kernel": 3, "flash_mma_dkv_kernel": 4}[kernel]
        width = int(re.search(r"<(\d+)>", name)[1])
        assert loop.hmma == products * loop.scores * width // (16 * 8 * 16), name


# ---- kernels ----

def test_what_ptxas_says(tmp_path):
    (tmp_path / "sums.cu.ptxas").write_text(LOG)
    assert sass.read_logs([tmp_path / "sums.cu.ptxas"]) == {
        ("sums", "_Z4plusIfEvPT_"): Instance("plus<float>(float*)", 64, 0, 512),
        ("sums", "_Z4plusIdEvPT_"): Instance("plus<double>(double*)", 72, 20, 0)}


def test_instances_are_joined(tmp_path, monkeypatch):
    """Without nvdisasm: what it says is 0."""
    monkeypatch.setattr(sass, "tool", lambda name: None)
    (tmp_path / "sums.cu.ptxas").write_text(LOG)
    build = sass.read_build(tmp_path)
    assert build == sass.Build({"sums:plus": Kernel(2, 72, 20, 512, 0, 28, 60, 0, 0, 0, 0, 0, 0, 0, 0)}, {}, "")


@pytest.mark.parametrize(("registers", "warps"),
                         [(32, 64), (40, 48), (64, 32), (65, 28), (72, 28), (128, 16), (255, 8)])
def test_warps_by_registers(registers, warps):
    assert sass.warps(registers) == warps


@pytest.mark.parametrize(("sizes", "warps"), [
    ((32, 1024), 64), ((40, 1024), 32), ((40, 768), 48), ((32, 32), 32), ((128, 384), 12), ((32, 128, 52224), 16),
    ((32, 128, 48 << 10), 16), ((32, 128, 37000), 24), ((32, 128, 227 << 10), 4), ((6, 1), 32)])
def test_warps_by_blocks_and_shared_memory(sizes, warps):
    assert sass.warps(*sizes) == warps


KNOWN = {"norm:rows": Kernel(4, 64, 8, 0, 256, 32, 128, *[10] * 8),
         "norm:sums": Kernel(2, 90, 0, 0, 256, 16, 32, *[0] * 8)}
NOT_COMPARED = ("instances", "registers", "shared", "threads", "mufu")


def test_the_table_of_kernels_is_read_as_it_is_written(tmp_path):
    sass.write_kernels(KNOWN, "13.0.88", tmp_path / "kernels.tsv")
    assert sass.read_kernels(tmp_path / "kernels.tsv") == (KNOWN, "13.0.88")


@pytest.mark.parametrize("field", [field for field in Kernel._fields if field not in NOT_COMPARED])
def test_what_is_worse_is_found(field):
    """In each column that is compared; what is better is not."""
    of = lambda sign: {**KNOWN, "norm:rows": KNOWN["norm:rows"]._replace(  # noqa: E731
        **{field: getattr(KNOWN["norm:rows"], field) + sign})}
    sign = 1 if field in sass.MORE_IS_WORSE else -1
    (found,) = sass.check_kernels(of(sign), KNOWN)
    assert found.startswith(f"norm:rows: {field} ")
    assert not sass.check_kernels(of(-sign), KNOWN)
    assert len(sass.check_kernels(of(sign), KNOWN, False)) == (field in sass.BY_PTXAS)


@pytest.mark.parametrize("field", ["registers", "shared", "threads", "mufu"])
def test_what_follows_from_others_is_not_compared(field):
    name = "norm:rows"
    for more in (-1, 1):
        changed = KNOWN[name]._replace(**{field: getattr(KNOWN[name], field) + more})
        assert not sass.check_kernels({**KNOWN, name: changed}, KNOWN)


def test_kernels_and_instances_of_one_side_are_found():
    (found,) = sass.check_kernels({**KNOWN, "norm:rows": KNOWN["norm:rows"]._replace(instances=5, load16=8)}, KNOWN)
    assert found.startswith("norm:rows: 5 instances, before 4")
    (found,) = sass.check_kernels({**KNOWN, "norm:fresh": KNOWN["norm:sums"]}, KNOWN)
    assert found.startswith("norm:fresh: only one")


def test_without_nvdisasm_spills_and_registers_are_compared(capsys):
    """For which the usual block has four warps."""
    kernels = {name: Kernel(*kernel[:4], 0, sass.warps(kernel.registers), *[0] * 9) for name, kernel in KNOWN.items()}
    assert not sass.compared(sass.Build(kernels, {}, ""), KNOWN, "13.0.88")
    assert "only registers and spills" in capsys.readouterr().out
    kernels["norm:rows"] = kernels["norm:rows"]._replace(registers=65, warps=28)
    assert sass.compared(sass.Build(kernels, {}, ""), KNOWN, "13.0.88") == ["norm:rows: warps 28, before 32"]


def test_instructions_of_another_compiler_are_not_compared(capsys):
    fewer = {**KNOWN, "norm:rows": KNOWN["norm:rows"]._replace(load16=0)}
    build = sass.Build(fewer, sass.read_table(), "13.1.1")
    assert not sass.compared(build, KNOWN, "13.0.88") and "13.1.1: instructions are not" in capsys.readouterr().out
    assert sass.compared(build._replace(compiler="13.0.88"), KNOWN, "13.0.88") == ["norm:rows: load16 0, before 10"]


# The same work twice, well and badly: in `bad`, the columns of the table that are to say so.
PAIRS = {
    "load16 store16": ("float4 *p = (float4 *)x; p[t] = p[t + 99];",
                       "for (int i = 0; i < 4; i++) x[4 * t + i] = x[4 * t + 396 + i];"),
    "ldgsts": ("__pipeline_memcpy_async(s + 4 * t, x + 4 * t, 16); __pipeline_commit(); __pipeline_wait_prior(0); "
               "__syncthreads(); x[t] = s[255 - t];",
               "*(float4 *)(s + 4 * t) = *(float4 *)(x + 4 * t); __syncthreads(); x[t] = s[255 - t];"),
    "hmma": ('asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, '
             '{%0, %1, %2, %3};" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : "r"(n));',
             "x[0] += n * x[1];"),
    "conversions": ("x[t] *= 0.1f;", "x[t] = (float)(0.1 * (double)x[t]);"),
    "divisions": ("l[t] = (long)((int)l[t] / n);", "l[t] /= n;"),
    "local": ("for (int i = 0; i < n; i++) x[t] += x[i];",
              "float a[32] = {}; for (int i = 0; i < n; i++) a[l[i] & 31] += x[i]; x[t] = a[t & 31];"),
    "warps": ("s[t] = x[t]; __syncthreads(); x[t] = s[t ^ n];",
              "__shared__ float more[8192]; more[t + n] = x[t]; __syncthreads(); x[t] = more[t * n] + s[t];"),
}


@needs_compiler
def test_what_is_worse_is_found_in_machine_code(tmp_path):
    kernels = [f"__global__ void __launch_bounds__(256) {kind}_{i}(float *x, long *l, int n)\n"
               f"{{ __shared__ float s[1024]; int t = threadIdx.x; {body} }}\n"
               for i, pair in enumerate(PAIRS.values()) for kind, body in zip(("good", "bad"), pair, strict=True)]
    (tmp_path / "pairs.cu").write_text("".join(["#include <cuda_pipeline.h>\n", *kernels]))
    done = subprocess.run(["nvcc", "-std=c++17", "-O3", "-c", "-Xptxas=-v", "-arch=sm_90", "pairs.cu", "-o",
                           "pairs.cu.o"], cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "pairs.cu.ptxas").write_text(done.stderr)
    build = sass.read_build(tmp_path)
    assert re.fullmatch(r"\d+\.\d+\.\d+", build.compiler) and len(build.kernels) == 2 * len(PAIRS)
    for i, columns in enumerate(PAIRS):
        good, bad = (build.kernels[f"pairs:{kind}_{i}"] for kind in ("good", "bad"))
        assert good.threads == 256
        found = {line.split()[1] for line in sass.check_kernels({"": bad}, {"": good})}
        assert found >= set(columns.split()), (columns, good, bad)
        assert not {line.split()[1] for line in sass.check_kernels({"": good}, {"": bad})} & set(columns.split())


@needs_compiler
def test_a_kernel_without_launch_bounds_is_an_error(tmp_path):
    (tmp_path / "one.cu").write_text("__global__ void one(float *x) { *x = 1; }\n")
    done = subprocess.run(["nvcc", "-c", "-Xptxas=-v", "-arch=sm_90", "one.cu", "-o", "one.cu.o"], cwd=tmp_path,
                          check=True, capture_output=True, text=True)
    (tmp_path / "one.cu.ptxas").write_text(done.stderr)
    with pytest.raises(ValueError, match=r"one\(float\*\) has no launch bounds"):
        sass.read_build(tmp_path)


def test_every_kernel_file_is_in_the_table():
    """.ci/run compares the table with a build; without nvcc, at least no file is forgotten."""
    named = {name.split(":")[0] for name in sass.read_kernels()[0]}
    launching = {path.stem for path in (ROOT / "cuda/kernels").glob("*.cu") if "__global__" in path.read_text()}
    assert named == launching


@pytest.mark.parametrize(("name", "others"), [
    *((name, 0) for name in ("copy:short_copy_kernel", "copy:copy_kernel", "copy:transpose_kernel",
                             "copy:transpose_pairs_kernel", "copy:rotate_kernel", "norm:norm_kernel",
                             "norm:norm_grad_kernel")),
    ("reduce:reduce_kernel", 4),  # the mean of integers
    ("elementwise:elementwise_kernel", 6)])  # Div and Mod of integers, and PyTorch's layout of Dropout's numbers
def test_indices_divide_no_64_bits(name, others):
    """Each thread computes indices, by multiplications. Such a division is a function of some 70 instructions. The table
    is that of the build: .ci/run compares them.
    """
    assert sass.read_kernels()[0][name].divisions == others


@pytest.mark.parametrize(("dtype", "size", "kernels"), [
    (torch.bfloat16, 64, {"flash_mma_kernel": (64, 2, 32), "flash_mma_dq_kernel": (64, 64),
                          "flash_mma_dkv_kernel": (64, 64)}),
    (torch.float16, 128, {"flash_mma_kernel": (128, 1, 64), "flash_mma_dq_kernel": (128, 32),
                          "flash_mma_dkv_kernel": (128, 32)}),
    *((torch.float32, 32 * columns, dict.fromkeys(("flash_kernel", "flash_dq_kernel", "flash_dkv_kernel"), (columns,)))
      for columns in (2, 4, 8))])
def test_dynamic_shared_memory_is_what_launches_ask_for(emulated, monkeypatch, dtype, size, kernels):
    _C.open_plugin(str(emulated))
    monkeypatch.setattr(flash, "DEVICE", "emulated")
    _C.disable_kernels(["cuda_attention_dnn", "cuda_attention_grad_dnn"])
    try:
        flash.tensor_cores(dtype, 5, 6, 1, 1, size, size, "")
    finally:
        _C.disable_kernels([])
        _C.disable_passes([])
    shared = ctypes.CDLL(str(emulated)).ont_emulate_shared
    shared.restype = ctypes.c_size_t
    for kernel, numbers in kernels.items():
        key = next(key for key in sass.DYNAMIC if key.endswith(f":{kernel}"))
        name = f"{kernel}<ont_bf16, {', '.join(map(str, numbers))}>(ont_flash_params)"
        assert shared(f"{kernel}<".encode()) == sass.dynamic_of(key, name), kernel
