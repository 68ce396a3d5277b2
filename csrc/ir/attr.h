/*
 * Node attributes: a short linked list in the graph's arena, read by name with a default.
 */
#ifndef ONT_IR_ATTR_H
#define ONT_IR_ATTR_H

#include "base/shape.h"

struct ont_graph;
struct ont_node;

typedef enum ont_attr_kind {
    ONT_ATTR_INT,
    ONT_ATTR_FLOAT,
    ONT_ATTR_STRING,
    ONT_ATTR_TENSOR,
    ONT_ATTR_GRAPH,
    ONT_ATTR_INTS,
    ONT_ATTR_FLOATS,
    ONT_ATTR_STRINGS,
} ont_attr_kind;

typedef struct ont_attr {
    struct ont_attr *next;
    const char *name;
    ont_attr_kind kind;
    size_t count; /* number of ints, floats or strings; bytes of a string */
    union {
        int64_t i;
        double f;
        const char *s; /* NUL-terminated as well */
        const int64_t *ints;
        const double *floats;
        const char *const *strings;
        const ont_tensor *tensor;
        struct ont_graph *graph;
    };
} ont_attr;

const ont_attr *ont_attr_find(const struct ont_node *node, const char *name, ont_attr_kind kind); /* NULL: absent */
int64_t ont_attr_int(const struct ont_node *node, const char *name, int64_t default_value);
double ont_attr_float(const struct ont_node *node, const char *name, double default_value);
const char *ont_attr_string(const struct ont_node *node, const char *name, const char *default_value);
/* The result is borrowed; NULL with *count 0 if the attribute is absent. */
const int64_t *ont_attr_ints(const struct ont_node *node, const char *name, size_t *count);
const double *ont_attr_floats(const struct ont_node *node, const char *name, size_t *count);

/* Setters copy the value into the graph's arena and replace an attribute of the same name. */
ont_status ont_attr_set_int(struct ont_graph *g, struct ont_node *node, const char *name, int64_t value) ONT_MUST_USE;
ont_status ont_attr_set_float(struct ont_graph *g, struct ont_node *node, const char *name, double value) ONT_MUST_USE;
ont_status ont_attr_set_string(struct ont_graph *g, struct ont_node *node, const char *name, const char *value,
                               size_t length) ONT_MUST_USE;
ont_status ont_attr_set_ints(struct ont_graph *g, struct ont_node *node, const char *name, const int64_t *values,
                             size_t count) ONT_MUST_USE;
ont_status ont_attr_set_floats(struct ont_graph *g, struct ont_node *node, const char *name, const double *values,
                               size_t count) ONT_MUST_USE;
ont_status ont_attr_set_tensor(struct ont_graph *g, struct ont_node *node, const char *name,
                               const ont_tensor *value) ONT_MUST_USE;
/* Adds to `to` every attribute of `from` whose name `to` does not have. */
ont_status ont_attr_copy_all(struct ont_graph *g, struct ont_node *to, const struct ont_node *from) ONT_MUST_USE;

#endif
