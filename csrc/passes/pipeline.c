/*
 * The order of passes, one line per pass; ONNXTRAIN_DISABLE=name,... skips optional ones.
 */
#include "passes/pipeline.h"

#include "passes/fuse_attention.h"
#include "passes/fuse_transpose.h"
#include "passes/options.h"
#include "passes/pack_rows.h"

typedef struct pass {
    const char *name;
    ont_status (*run)(ont_graph *g);
    bool required;
    const char *fused_op; /* operator of our domain that the pass creates: skipped if the device has no kernel for it */
    bool device_only;          /* skipped on the CPU, unless "+name" forces it: for tests */
    const char *requires_pass; /* pass without which this one is skipped too */
} pass;

static const pass before_grad[] = { /* after inference */
    {"cse", ont_pass_cse, false, NULL, false, NULL},
    {"conv_to_gemm", ont_pass_conv_to_gemm, false, NULL, false, NULL},
    {"fuse_transpose", ont_pass_fuse_transpose, false, NULL, false, NULL},
    {"align_products", ont_pass_align_products, false, NULL, true, NULL},
    {"fuse_rotary", ont_pass_fuse_rotary, false, "Rotate", false, NULL},
    {"narrow_rotary", ont_pass_narrow_rotary, false, "Rotate", true, NULL},
    {"fuse_rms_norm", ont_pass_fuse_rms_norm, false, "FusedNorm", true, NULL},
    {"fuse_attention", ont_pass_fuse_attention, false, "FusedAttention", false, NULL},
};

static const pass after_grad[] = {
    {"infer", ont_pass_infer, true, NULL, false, NULL}, /* folds constants that gradient rules built */
    {"fuse_transpose", ont_pass_fuse_transpose, false, NULL, false, NULL},
    {"cse", ont_pass_cse, false, NULL, false, NULL},
    {"join_slices", ont_pass_join_slices, false, NULL, false, NULL},
    {"row_indices", ont_pass_row_indices, false, "InRange", false, NULL},
    {"fuse_sparse_matmul", ont_pass_fuse_sparse_matmul, false, "SparseMatMul", false, NULL},
    {"precision", ont_pass_matmul_precision, false, NULL, false, NULL},
    {"fuse_loss", ont_pass_fuse_loss, false, NULL, false, NULL},
    {"fuse_gemm", ont_pass_fuse_gemm, false, "FusedMatMul", false, NULL},
    {"fuse_gelu", ont_pass_fuse_gelu, false, "GeluMatMul", true, NULL},
    {"fuse_gradients", ont_pass_fuse_gradients, false, NULL, false, NULL},
    {"fuse_batchnorm", ont_pass_fuse_batchnorm, false, "FusedBatchNorm", false, NULL},
    {"promote", ont_pass_promote, true, NULL, false, NULL},
    {"cse", ont_pass_cse, false, NULL, false, NULL},
    {"dce", ont_pass_dce, true, NULL, false, NULL},
    {"fuse_gemm", ont_pass_fuse_gemm, false, "FusedMatMul", false, NULL},
    {"fuse_batchnorm", ont_pass_fuse_batchnorm, false, "FusedBatchNorm", false, NULL},
    {"fuse_conv_relu", ont_pass_fuse_conv_relu, false, NULL, true, "channels_last"},
    {"stream_loss", ont_pass_stream_loss, false, "StreamedCrossEntropy", false, NULL},
    {"recompute_regions", ont_pass_recompute_regions, false, NULL, false, NULL},
    {"keep_narrow", ont_pass_keep_narrow, false, NULL, false, NULL},
    {"recompute", ont_pass_recompute, false, NULL, false, NULL},
    {"channels_last", ont_pass_channels_last, false, NULL, true, NULL},
    {"fuse_norm", ont_pass_fuse_norm, false, "FusedNorm", true, NULL},
    {"fuse_elementwise", ont_pass_fuse_elementwise, false, "FusedElementwise", false, NULL},
    {"fuse_reductions", ont_pass_fuse_reductions, false, "FusedReduce", false, "fuse_elementwise"},
    {"fuse_sums", ont_pass_fuse_sums, false, NULL, false, NULL},
};

static bool lacks_kernel(const ont_graph *g, const char *fused_op)
{
    uint32_t n = 0;
    const ont_op *op = fused_op && g->device ? ont_op_find(ONT_DOMAIN, fused_op, INT64_MAX) : NULL;
    return op && !ont_op_kernels(op, g->device, &n);
}

static ont_status run_passes(const pass *passes, size_t n, ont_graph *g)
{
    for (size_t i = 0; i < n; i++) {
        const char *name = passes[i].name, *requirement = passes[i].requires_pass;
        if ((!passes[i].required && ont_pass_is_disabled(name)) || lacks_kernel(g, passes[i].fused_op)) continue;
        if (requirement && ont_pass_is_disabled(requirement)) continue;
        if (passes[i].device_only && !g->device && !ont_pass_is_forced(name)) continue;
        ONT_TRY(passes[i].run(g));
#ifndef NDEBUG
        ONT_TRY(ont_context(ont_graph_verify(g), "after pass %s", passes[i].name));
#endif
    }
    return ONT_OK;
}

ont_status ont_passes_before_grad(ont_graph *g, ont_known_values *known)
{
    ONT_TRY(ont_pass_infer_with_values(g, known));
    if (known->n_required) return ONT_OK;
#ifndef NDEBUG
    ONT_TRY(ont_context(ont_graph_verify(g), "after pass infer"));
#endif
    g->torch_random &= !known->used; /* a probe drew numbers of our generator, which this program has to repeat */
    ONT_TRY(ont_pass_torch_random(g));
    ONT_TRY(run_passes(before_grad, sizeof before_grad / sizeof *before_grad, g));
    if (ont_pass_is_disabled("pack_rows")) return ONT_OK;
    ONT_TRY(ont_context(ont_pass_pack_rows(g, known), "packing rows"));
#ifndef NDEBUG
    ONT_TRY(ont_context(ont_graph_verify(g), "after pass pack_rows"));
#endif
    return ONT_OK;
}

ont_status ont_passes_after_grad(ont_graph *g)
{
    return run_passes(after_grad, sizeof after_grad / sizeof *after_grad, g);
}
