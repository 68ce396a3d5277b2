/*
 * The core's functions under their own names: each goes through the table that the extension passes to the plugin.
 * Every C file of this folder includes this header after all other headers of csrc/.
 */
#ifndef ONT_CUDA_CORE_SHIM_H
#define ONT_CUDA_CORE_SHIM_H

#include "device/plugin.h"
#include "ops/plugin_api.h"

extern const ont_core *ont_cuda_core;

#define ont_set_error ont_cuda_core->set_error
#define ont_context ont_cuda_core->context
#define ont_error_message ont_cuda_core->error_message
#define ont_arena_alloc ont_cuda_core->arena_alloc
#define ont_arena_array ont_cuda_core->arena_array
#define ont_malloc ont_cuda_core->malloc
#define ont_calloc ont_cuda_core->calloc
#define ont_free ont_cuda_core->free
#define ont_log ont_cuda_core->log
#define ont_log_enabled ont_cuda_core->log_enabled
#define ont_attr_find ont_cuda_core->attr_find
#define ont_attr_int ont_cuda_core->attr_int
#define ont_attr_float ont_cuda_core->attr_float
#define ont_attr_string ont_cuda_core->attr_string
#define ont_attr_ints ont_cuda_core->attr_ints
#define ont_attr_floats ont_cuda_core->attr_floats
#define ont_const_ints ont_cuda_core->const_ints
#define ont_const_scalar ont_cuda_core->const_scalar
#define ont_shape_count ont_cuda_core->shape_count
#define ont_shape_count_range ont_cuda_core->shape_count_range
#define ont_shape_strides ont_cuda_core->shape_strides
#define ont_shape_broadcast ont_cuda_core->shape_broadcast
#define ont_shape_broadcast_strides ont_cuda_core->shape_broadcast_strides
#define ont_shape_axis ont_cuda_core->shape_axis
#define ont_shape_of ont_cuda_core->shape_of
#define ont_shape_equal ont_cuda_core->shape_equal
#define ont_shape_text ont_cuda_core->shape_text
#define ont_dtype_size ont_cuda_core->dtype_size
#define ont_dtype_name ont_cuda_core->dtype_name
#define ont_dtype_is_float ont_cuda_core->dtype_is_float
#define ont_dtype_is_int ont_cuda_core->dtype_is_int
#define ont_tile_read ont_cuda_core->tile_read
#define ont_tile_link ont_cuda_core->tile_link
#define ont_bcast_init ont_cuda_core->bcast_init
#define ont_strided_init ont_cuda_core->strided_init
#define ont_reduce_read ont_cuda_core->reduce_read
#define ont_window_init ont_cuda_core->window_init
#define ont_pool_read ont_cuda_core->pool_read
#define ont_attention_read ont_cuda_core->attention_read
#define ont_attention_covered ont_cuda_core->attention_covered
#define ont_dropout_rule_of ont_cuda_core->dropout_rule_of
#define ont_tune_fastest ont_cuda_core->tune_fastest
#define ont_tune_find ont_cuda_core->tune_find
#define ont_tune_keep ont_cuda_core->tune_keep
#define ont_gemm_is_deterministic ont_cuda_core->gemm_is_deterministic
#define ont_pad_read ont_cuda_core->pad_read
#define ont_resize_read ont_cuda_core->resize_read
#define ont_resize_taps ont_cuda_core->resize_taps
#define ont_taps_transpose ont_cuda_core->taps_transpose
#define ont_scatter_reduction ont_cuda_core->scatter_reduction
#define ont_scan_read ont_cuda_core->scan_read
#define ont_scan_accept ont_cuda_core->scan_accept
#define ont_recurrent_read ont_cuda_core->recurrent_read
#define ont_fill_read ont_cuda_core->fill_read
#define ont_quantize_read ont_cuda_core->quantize_read

/* random.h has inline functions that call the core. */
#include "ops/random/random.h"

#endif
