/*
 * The core's functions that a plugin may call, as a table, because the extension exports no symbols. cuda/core_shim.h
 * maps the functions' names to the table on the plugin's side.
 */
#ifndef ONT_OPS_CORE_H
#define ONT_OPS_CORE_H

#include "base/alloc.h"
#include "base/autotune.h"
#include "base/log.h"
#include "device/gemm.h"
#include "ops/support/broadcast.h"
#include "ops/random/dropout.h"
#include "ops/random/fill.h"
#include "ops/attention/fused_attention.h"
#include "ops/index/scatter.h"
#include "ops/layout/pad.h"
#include "ops/op.h"
#include "ops/pool/pool.h"
#include "ops/quant/quantize.h"
#include "ops/recurrent/recurrent_whole.h"
#include "ops/reduce/cumulative.h"
#include "ops/reduce/reduce.h"
#include "ops/support/strided.h"
#include "ops/elementwise/tile_program.h"
#include "ops/support/window.h"
#include "ops/vision/resize.h"

#define ONT_CORE_LIST(X) \
    X(set_error) X(context) X(error_message) X(arena_alloc) X(arena_array) X(malloc) X(calloc) X(free) X(log) \
    X(log_enabled) X(attr_find) X(attr_int) X(attr_float) X(attr_string) X(attr_ints) X(attr_floats) X(const_ints) \
    X(const_scalar) X(shape_count) X(shape_count_range) X(shape_strides) X(shape_broadcast) X(shape_broadcast_strides) \
    X(shape_axis) X(shape_of) X(shape_equal) X(shape_text) X(dtype_size) X(dtype_name) X(dtype_is_float) \
    X(dtype_is_int) X(tile_read) X(tile_link) X(bcast_init) X(strided_init) X(reduce_read) X(window_init) X(pool_read) \
    X(attention_read) X(attention_covered) X(dropout_rule_of) X(tune_fastest) X(tune_find) X(tune_keep) \
    X(gemm_is_deterministic) X(pad_read) X(resize_read) X(resize_taps) X(taps_transpose) \
    X(scatter_reduction) X(scan_read) X(scan_accept) X(recurrent_read) X(fill_read) X(quantize_read)

typedef struct ont_core {
    int version;
#define X(name) __typeof__(ont_##name) *name;
    ONT_CORE_LIST(X)
#undef X
} ont_core;

extern const ont_core ont_core_table;

#endif
