/*
 * Prints a graph in the style of ONNX's textual format. For people and tests; nothing parses it.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "ir/graph.h"

typedef struct text {
    char *bytes;
    size_t used, capacity;
    ont_status status;
} text;

static void put(text *t, const char *format, ...) ONT_PRINTF(2, 3);

static void put(text *t, const char *format, ...)
{
    if (t->status != ONT_OK) return;
    for (;;) {
        va_list args;
        va_start(args, format);
        int n = vsnprintf(t->bytes + t->used, t->capacity - t->used, format, args);
        va_end(args);
        if (n >= 0 && (size_t)n < t->capacity - t->used) {
            t->used += (size_t)n;
            return;
        }
        size_t capacity = t->capacity * 2 + (n > 0 ? (size_t)n : 0);
        char *bigger = ont_realloc(t->bytes, capacity, 1);
        if (!bigger) {
            t->status = ONT_ENOMEM;
            return;
        }
        t->bytes = bigger;
        t->capacity = capacity;
    }
}

static bool is_plain(const char *name)
{
    if (!*name || *name == '%') return false;
    for (; *name; name++)
        if ((unsigned char)*name <= ' ' || *name == 0x7f || strchr("\"\\,()<>{}[]=#", *name)) return false;
    return true;
}

/* Prints bytes in quotes, with escapes, so that every line stays one line. */
static void put_text(text *t, const char *bytes)
{
    put(t, "\"");
    for (; *bytes; bytes++) {
        unsigned char c = (unsigned char)*bytes;
        if (c == '"' || c == '\\')
            put(t, "\\%c", c);
        else if (c < ' ' || c == 0x7f)
            put(t, "\\x%02x", c);
        else
            put(t, "%c", c);
    }
    put(t, "\"");
}

static void put_name(text *t, const char *name)
{
    if (is_plain(name))
        put(t, "%s", name);
    else
        put_text(t, name);
}

static void put_value(text *t, const ont_value *v)
{
    if (v->anonymous)
        put(t, "%s", v->name);
    else
        put_name(t, v->name);
}

static void put_type(text *t, const ont_graph *g, const ont_value *v)
{
    put(t, "%s", ont_dtype_name(v->dtype));
    if (!v->has_shape) return;
    put(t, "[");
    for (int i = 0; i < v->shape.rank; i++) {
        int64_t dim = v->shape.dims[i];
        put(t, "%s", i ? "," : "");
        if (dim >= 0)
            put(t, "%" PRId64, dim);
        else if (dim == ONT_DIM_UNKNOWN || (uint32_t)ONT_DIM_SYMBOL_INDEX(dim) >= g->n_symbols)
            put(t, "?");
        else
            put_name(t, g->symbols[ONT_DIM_SYMBOL_INDEX(dim)]);
    }
    put(t, "]");
}

static void put_attr(text *t, const ont_attr *attr)
{
    put_name(t, attr->name);
    put(t, " = ");
    switch (attr->kind) {
    case ONT_ATTR_INT: put(t, "%" PRId64, attr->i); break;
    case ONT_ATTR_FLOAT: put(t, "%g", attr->f); break;
    case ONT_ATTR_STRING: put_text(t, attr->s); break;
    case ONT_ATTR_TENSOR: put(t, "{%s tensor}", ont_dtype_name(attr->tensor->dtype)); break;
    case ONT_ATTR_GRAPH: put(t, "{graph}"); break;
    case ONT_ATTR_INTS:
        for (size_t i = 0; i < attr->count; i++) put(t, "%s%" PRId64, i ? ", " : "[", attr->ints[i]);
        put(t, "%s", attr->count ? "]" : "[]");
        break;
    case ONT_ATTR_FLOATS:
        for (size_t i = 0; i < attr->count; i++) put(t, "%s%g", i ? ", " : "[", attr->floats[i]);
        put(t, "%s", attr->count ? "]" : "[]");
        break;
    case ONT_ATTR_STRINGS: put(t, "{%zu strings}", attr->count); break;
    }
}

/* Small integer and float constants are shown, larger ones only by type. */
static void put_constant(text *t, const ont_value *v)
{
    int64_t count = ont_shape_count(&v->data->shape);
    if (count > 8) return;
    put(t, " = {");
    for (int64_t i = 0; i < count; i++) {
        put(t, "%s", i ? ", " : "");
        switch (v->dtype) {
        case ONT_INT64: put(t, "%" PRId64, ((const int64_t *)v->data->data)[i]); break;
        case ONT_INT32: put(t, "%" PRId32, ((const int32_t *)v->data->data)[i]); break;
        case ONT_FLOAT32: put(t, "%g", (double)((const float *)v->data->data)[i]); break;
        case ONT_FLOAT64: put(t, "%g", ((const double *)v->data->data)[i]); break;
        case ONT_BOOL: put(t, "%d", ((const uint8_t *)v->data->data)[i]); break;
        default: put(t, "..."); break;
        }
    }
    put(t, "}");
}

static void put_node(text *t, const ont_graph *g, const ont_node *node)
{
    put(t, "  ");
    for (uint32_t i = 0; i < node->n_outputs; i++) {
        put(t, "%s", i ? ", " : "");
        if (!node->outputs[i]) continue;
        put_type(t, g, node->outputs[i]);
        put(t, " ");
        put_value(t, node->outputs[i]);
    }
    put(t, " = ");
    if (*node->domain) put_name(t, node->domain);
    put(t, "%s", *node->domain ? "." : "");
    put_name(t, node->op_type);
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next) {
        put(t, "%s", attr == node->attrs ? " <" : ", ");
        put_attr(t, attr);
        if (!attr->next) put(t, ">");
    }
    put(t, " (");
    for (uint32_t i = 0; i < node->n_inputs; i++) {
        put(t, "%s", i ? ", " : "");
        if (node->inputs[i].value) put_value(t, node->inputs[i].value);
    }
    put(t, ")\n");
}

static void put_typed(text *t, const ont_graph *g, const ont_value *v)
{
    put_type(t, g, v);
    put(t, " ");
    put_value(t, v);
}

static void put_interface(text *t, const ont_graph *g)
{
    put_name(t, g->name);
    put(t, " (");
    for (uint32_t i = 0; i < g->n_inputs; i++) {
        put(t, "%s", i ? ", " : "");
        put_typed(t, g, g->inputs[i]);
    }
    put(t, ") => (");
    for (uint32_t i = 0; i < g->n_outputs; i++) {
        put(t, "%s", i ? ", " : "");
        put_typed(t, g, g->outputs[i]);
    }
    put(t, ")\n");
}

/* `is_output`: per value id. */
static void put_constants(text *t, const ont_graph *g, const bool *is_output)
{
    for (uint32_t i = 0; i < g->n_values; i++) {
        const ont_value *v = g->values[i];
        if (v->kind != ONT_VALUE_CONSTANT || (!v->uses && !is_output[i])) continue;
        put(t, "  ");
        put_typed(t, g, v);
        put_constant(t, v);
        put(t, "\n");
    }
}

ont_status ont_graph_print(const ont_graph *g, char **out)
{
    text t = {.capacity = 4096};
    t.bytes = ont_malloc(t.capacity);
    bool *is_output = ont_calloc(g->n_values, sizeof *is_output);
    if (!t.bytes || !is_output) {
        ont_free(t.bytes);
        ont_free(is_output);
        return ONT_ENOMEM;
    }
    for (uint32_t i = 0; i < g->n_outputs; i++) is_output[g->outputs[i]->id] = true;
    put_interface(&t, g);
    put_constants(&t, g, is_output);
    ont_free(is_output);
    put(&t, "{\n");
    bool split = false;
    for (const ont_node *node = g->first; node; node = node->next) {
        if (node->backward && !split) put(&t, "  # backward\n");
        split |= node->backward;
        put_node(&t, g, node);
    }
    put(&t, "}\n");
    if (t.status != ONT_OK) {
        ont_free(t.bytes);
        return t.status;
    }
    *out = t.bytes;
    return ONT_OK;
}
