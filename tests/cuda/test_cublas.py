"""libs/cublas.c on the emulated cuBLASLt: each rule of the library finds the fault that breaks it."""

from __future__ import annotations

import pytest
from planted import Fault

FILE = "libs/cublas.c"
FAULTS = {
    "a workspace that is aligned as the slab": Fault(
        FILE, "(void *)(((uintptr_t)call->x->work + WORK_ALIGN - 1) / WORK_ALIGN * WORK_ALIGN)", "call->x->work",
        "unaligned,mlp,mlp_halves", "cublasLtMatmul: a workspace at"),
    "a workspace that is too small": Fault(
        FILE, "&h->algo, work, h->workspace, call->stream", "&h->algo, work, h->workspace / 2, call->stream",
        "unaligned,mlp,mlp_halves", "bytes of workspace, and the algorithm needs"),
    "a heuristic that is told no alignment": Fault(
        FILE, "i <= PREFERENCE_ALIGNMENT_D; i++", "i < PREFERENCE_ALIGNMENT_A; i++", "unaligned",
        "is not aligned to 256 bytes, as the heuristic was told"),
    "a heuristic that is told the alignment of another call": Fault(
        FILE, "if (!p->by_alignment[call->log])", "call->log = ALIGNMENTS - 1;\n    if (!p->by_alignment[call->log])",
        "unaligned", "is not aligned to 64 bytes, as the heuristic was told"),
    "a heuristic that is told nothing of the bias": Fault(
        FILE, "epilogue & EPILOGUE_BIAS ? aligned : NULL", "NULL", "unaligned,mlp", "cublasLtMatmul: the bias at"),
    "a proposal that is marked as unsupported": Fault(
        FILE, "if (!list->candidates[i].state) list->", "list->", "unaligned,mlp,mlp_halves",
        "an algorithm that no heuristic has given"),
    "a refusal that ends the step": Fault(
        FILE, "while (error == CUBLAS_NOT_SUPPORTED && ++candidate", "while (false && ++candidate",
        "by_rule", "cuBLASLt, a product: status 15"),
    "a choice that is measured where it must follow from a rule": Fault(
        FILE, "ont_gemm_is_deterministic() ? 0 : -1", "-1", "by_rule", "a kernel is measured"),
    "a leading dimension below the rows": Fault(
        FILE, "make_layout(&p->c, result, m, n, g->ldc,", "make_layout(&p->c, result, m, n, g->ldc - 1,", "unaligned",
        "columns, leading dimension"),
    "a transposition that is left out": Fault(
        FILE, "op_first = g->trans_b ? OP_T : OP_N", "op_first = OP_N", "unaligned",
        "cublasLtMatmulAlgoGetHeuristic: A has"),
    "a bias of another type": Fault(
        FILE, "DESC_BIAS_TYPE, &result, sizeof result", "DESC_BIAS_TYPE, &epilogue, sizeof epilogue", "unaligned",
        "a bias of type 4 for a result of type 0"),
    "an attribute of another size": Fault(
        FILE, "PREFERENCE_WORKSPACE, &workspace, sizeof workspace", "PREFERENCE_WORKSPACE, &workspace, 4", "unaligned",
        "cublasLtMatmulPreferenceSetAttribute: attribute 1 has 8 bytes, not 4"),
    "factors of another type": Fault(
        FILE, "p->f64 ? TYPE_64F : TYPE_32F", "TYPE_32F", "unaligned", "compute type 70 with scale type 0"),
    "16 bits computed as TF32": Fault(
        FILE, "p->tf32 = gemm->dtype == ONT_FLOAT32 && ont_cuda_allocator->tf32", "p->tf32 = true", "mlp_halves",
        "types 2, 2 to 2 with compute type 77"),
    "rows that the second matrix may not have": Fault(
        "ops/matmul.c", 's.gemm.n % 8 ? "n is not a multiple of 8" : s.blas->accept', "s.blas->accept",
        "gelu_epilogues", "leading dimension 13 of the auxiliary matrix"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(planted_faults, name):
    planted_faults.assert_found(name)
