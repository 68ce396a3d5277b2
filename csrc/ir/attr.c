/*
 * Attribute list of a node. Values are copied into the graph's arena; a replaced value stays there until the graph is
 * destroyed.
 */
#include "ir/attr.h"

#include <string.h>

#include "ir/graph.h"

const ont_attr *ont_attr_find(const ont_node *node, const char *name, ont_attr_kind kind)
{
    for (const ont_attr *attr = node->attrs; attr; attr = attr->next)
        if (attr->kind == kind && !strcmp(attr->name, name)) return attr;
    return NULL;
}

int64_t ont_attr_int(const ont_node *node, const char *name, int64_t default_value)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_INT);
    return attr ? attr->i : default_value;
}

double ont_attr_float(const ont_node *node, const char *name, double default_value)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_FLOAT);
    return attr ? attr->f : default_value;
}

const char *ont_attr_string(const ont_node *node, const char *name, const char *default_value)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_STRING);
    return attr ? attr->s : default_value;
}

const int64_t *ont_attr_ints(const ont_node *node, const char *name, size_t *count)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_INTS);
    *count = attr ? attr->count : 0;
    return attr ? attr->ints : NULL;
}

const double *ont_attr_floats(const ont_node *node, const char *name, size_t *count)
{
    const ont_attr *attr = ont_attr_find(node, name, ONT_ATTR_FLOATS);
    *count = attr ? attr->count : 0;
    return attr ? attr->floats : NULL;
}

/* Overwrites the attribute of that name with `value`, or adds it. */
static ont_status put(ont_graph *g, ont_node *node, ont_attr value)
{
    ont_attr *attr = node->attrs;
    while (attr && strcmp(attr->name, value.name)) attr = attr->next;
    if (attr) {
        value.name = attr->name;
        value.next = attr->next;
    } else {
        attr = ont_arena_alloc(&g->arena, sizeof *attr);
        value.name = attr ? ont_arena_strdup(&g->arena, value.name) : NULL;
        if (!value.name) return ONT_ENOMEM;
        value.next = node->attrs;
        node->attrs = attr;
    }
    *attr = value;
    return ONT_OK;
}

static void *copied(ont_graph *g, const void *from, size_t count, size_t size)
{
    void *copy = ont_arena_array(&g->arena, count ? count : 1, size);
    if (copy && count) memcpy(copy, from, count * size);
    return copy;
}

ont_status ont_attr_set_int(ont_graph *g, ont_node *node, const char *name, int64_t value)
{
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_INT, .i = value});
}

ont_status ont_attr_set_float(ont_graph *g, ont_node *node, const char *name, double value)
{
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_FLOAT, .f = value});
}

ont_status ont_attr_set_string(ont_graph *g, ont_node *node, const char *name, const char *value, size_t length)
{
    char *copy = ont_arena_strndup(&g->arena, value, length);
    if (!copy) return ONT_ENOMEM;
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_STRING, .s = copy, .count = length});
}

ont_status ont_attr_set_ints(ont_graph *g, ont_node *node, const char *name, const int64_t *values, size_t count)
{
    int64_t *copy = copied(g, values, count, sizeof *values);
    if (!copy) return ONT_ENOMEM;
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_INTS, .ints = copy, .count = count});
}

ont_status ont_attr_set_floats(ont_graph *g, ont_node *node, const char *name, const double *values, size_t count)
{
    double *copy = copied(g, values, count, sizeof *values);
    if (!copy) return ONT_ENOMEM;
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_FLOATS, .floats = copy, .count = count});
}

ont_status ont_attr_set_tensor(ont_graph *g, ont_node *node, const char *name, const ont_tensor *value)
{
    ont_tensor *tensor = ont_arena_alloc(&g->arena, sizeof *tensor);
    if (!tensor) return ONT_ENOMEM;
    *tensor = *value;
    tensor->data = copied(g, value->data, value->bytes, 1);
    if (!tensor->data) return ONT_ENOMEM;
    return put(g, node, (ont_attr){.name = name, .kind = ONT_ATTR_TENSOR, .tensor = tensor});
}

ont_status ont_attr_copy_all(ont_graph *g, ont_node *to, const ont_node *from)
{
    for (const ont_attr *attr = from->attrs; attr; attr = attr->next) {
        bool present = false;
        for (const ont_attr *own = to->attrs; own && !present; own = own->next)
            present = !strcmp(own->name, attr->name);
        if (present) continue;
        switch (attr->kind) {
        case ONT_ATTR_INT: ONT_TRY(ont_attr_set_int(g, to, attr->name, attr->i)); break;
        case ONT_ATTR_FLOAT: ONT_TRY(ont_attr_set_float(g, to, attr->name, attr->f)); break;
        case ONT_ATTR_STRING: ONT_TRY(ont_attr_set_string(g, to, attr->name, attr->s, attr->count)); break;
        case ONT_ATTR_INTS: ONT_TRY(ont_attr_set_ints(g, to, attr->name, attr->ints, attr->count)); break;
        case ONT_ATTR_FLOATS: ONT_TRY(ont_attr_set_floats(g, to, attr->name, attr->floats, attr->count)); break;
        /* Elements are immutable: a clone shares them, and its source outlives it. */
        case ONT_ATTR_TENSOR: ONT_TRY(put(g, to, *attr)); break;
        case ONT_ATTR_GRAPH: ONT_TRY(put(g, to, *attr)); break;
        case ONT_ATTR_STRINGS: ONT_TRY(put(g, to, *attr)); break;
        }
    }
    return ONT_OK;
}
