/*
 * What the files of pack_rows share: the sets of rows that are read, and the values that exist in packed form.
 */
#ifndef ONT_PASSES_PACK_ROWS_STATE_H
#define ONT_PASSES_PACK_ROWS_STATE_H

#include "passes/pack_rows.h"
#include "passes/row_rules.h"

enum { ONT_MAX_ROW_SOURCES = 64, ONT_MAX_ROW_SETS = 96, ONT_NO_ROWS = -1, ONT_ALL_ROWS = -2 };

/* Where a demand for some rows begins. */
typedef struct ont_row_source {
    ont_row_rule rule;   /* ONT_ROWS_LOSS, ONT_ROWS_ATTENTION, or one of a selection */
    const ont_node *node;
    int64_t n;           /* all rows */
    int within;          /* the set of the selection's result rows that are read; ONT_NO_ROWS: all of them */
    int64_t inner;       /* elements of a row of attention's K */
    ont_value *marks;    /* bool (n), built on demand */
    ont_value *numbers;  /* of a selection: the row that each of its rows is */
} ont_row_source;

typedef struct ont_row_set {
    int64_t n;
    uint64_t sources;    /* bits */
    int64_t count;       /* rows to compute; n: all of them */
    bool counted;        /* the count depends on data */
    double cost, products; /* of the nodes that it would shrink; that of matmuls alone */
    int packed_as;       /* the set whose rows are computed: this one, or a slightly larger one; ONT_NO_ROWS: all */
    ont_value *marks, *rows, *inverse;
} ont_row_set;

typedef struct ont_packed_value {
    ont_value *value;
    int set;
} ont_packed_value;

typedef struct ont_pack_state {
    ont_graph *g;
    uint32_t n_values, n_nodes;
    int *demands;        /* per value: a set, ONT_NO_ROWS (nothing) or ONT_ALL_ROWS */
    int *accepted;       /* per node: the set that it can be computed for, or ONT_NO_ROWS */
    ont_packed_value *packed; /* per value */
    ont_value **whole;   /* per value: its packed form, unpacked */
    ont_row_source sources[ONT_MAX_ROW_SOURCES];
    int n_sources;
    ont_row_set sets[ONT_MAX_ROW_SETS];
    int n_sets;
    ont_node *front;     /* first node of the graph as it was */
    bool forced;
} ont_pack_state;

/* Builds, in front of the graph, bool (n): which rows belong to the set. The status is the builder's. */
ont_value *ont_pack_build_marks(ont_pack_state *s, ont_builder *b, int set);
/* Builds all accepted nodes over packed rows, and lets all others read what they need. */
ont_status ont_pack_rewrite(ont_pack_state *s) ONT_MUST_USE;

#endif
