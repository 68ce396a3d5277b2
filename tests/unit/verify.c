/*
 * Unit tests of csrc/plan/verify.c: each defect that a plan could have is found. Plans that are right stand in plan.c,
 * whose builds verify each.
 */
#include "check.h"
#include "plan/plan.h"

/* x -> a -> b, a + b -> c: a is needed until c is computed. */
typedef struct sample {
    ont_graph *g;
    ont_value *x, *a, *b, *c;
    ont_plan_step steps[3];
    ont_plan_input in;
    ont_location locations[4];
    size_t work_offsets[3];
    uint32_t deliver_before[1];
    ont_plan plan;
} sample;

static bool is_view(const ont_node *node)
{
    return !strcmp(node->op_type, "View");
}

static ont_value *node_of(sample *s, uint32_t step, ont_value *p, ont_value *q)
{
    const int64_t count = 16; /* 64 bytes */
    const ont_node_spec spec = {.domain = "", .op_type = "F", .inputs = (ont_value *[]){p, q}, .n_inputs = q ? 2 : 1,
                                .n_outputs = 1};
    ont_node *node;
    CHECK_OK(ont_graph_add_node(s->g, NULL, &spec, &node));
    node->outputs[0]->dtype = ONT_FLOAT32;
    node->outputs[0]->has_shape = true;
    node->outputs[0]->shape = ont_shape_of(1, &count);
    s->steps[step] = (ont_plan_step){.node = node};
    return node->outputs[0];
}

/* A plan without a defect: a, b and c side by side. */
static void begin(sample *s)
{
    const int64_t count = 16;
    *s = (sample){0};
    CHECK_OK(ont_graph_create("verify", &s->g));
    ont_shape shape = ont_shape_of(1, &count);
    CHECK_OK(ont_graph_add_input(s->g, NULL, ONT_FLOAT32, &shape, &s->x));
    s->a = node_of(s, 0, s->x, NULL);
    s->b = node_of(s, 1, s->a, NULL);
    s->c = node_of(s, 2, s->a, s->b);
    CHECK_OK(ont_graph_set_outputs(s->g, &s->c, 1));
    s->in = (ont_plan_input){.g = s->g, .steps = s->steps, .n_steps = 3, .split = 3, .n_forward_outputs = 1,
                             .is_view = is_view};
    s->deliver_before[0] = ONT_PLAN_BLOCK;
    s->plan = (ont_plan){.locations = s->locations, .work_offsets = s->work_offsets,
                         .deliver_before = s->deliver_before, .slab_bytes = 256};
    s->locations[s->x->id].kind = ONT_LOCATION_INPUT;
    ont_value *const values[] = {s->a, s->b, s->c};
    for (size_t i = 0; i < 3; i++) s->locations[values[i]->id] = (ont_location){ONT_LOCATION_SLAB, 0, 64 * i};
}

static void expect(sample *s, const char *message)
{
    if (message) CHECK_FAILS(ont_plan_verify(&s->in, &s->plan), ONT_EINTERNAL, message);
    else CHECK_OK(ont_plan_verify(&s->in, &s->plan));
    ont_graph_destroy(s->g);
}

TEST(verify_takes_a_right_plan)
{
    sample s;
    begin(&s);
    expect(&s, NULL);
}

TEST(verify_finds_a_value_that_is_overwritten)
{
    sample s;
    begin(&s);
    s.locations[s.b->id].offset = s.locations[s.a->id].offset;
    expect(&s, "writes over");
}

TEST(verify_allows_the_last_reader_to_work_in_place)
{
    for (uint32_t inplace = 0; inplace < 2; inplace++) {
        sample s;
        begin(&s);
        s.locations[s.c->id].offset = s.locations[s.a->id].offset;
        s.steps[2].inplace = inplace;
        expect(&s, inplace ? NULL : "writes over");
    }
}

TEST(verify_finds_scratch_memory_over_an_operand_and_over_a_result)
{
    for (int over_result = 0; over_result < 2; over_result++) {
        sample s;
        begin(&s);
        s.steps[1].work_bytes = 64;
        s.work_offsets[1] = s.locations[(over_result ? s.b : s.a)->id].offset;
        expect(&s, over_result ? "overlap" : "writes over");
    }
}

TEST(verify_finds_an_output_that_is_overwritten_before_it_is_copied)
{
    sample s;
    begin(&s);
    CHECK_OK(ont_graph_set_outputs(s.g, &s.b, 1));
    s.locations[s.c->id].offset = s.locations[s.b->id].offset;
    s.steps[2].inplace = 2;
    expect(&s, "writes over"); /* it is copied after the last step, so that not even that one may work in place on it */
}

TEST(verify_finds_bytes_outside_of_the_slab)
{
    sample s;
    begin(&s);
    s.plan.slab_bytes = 128;
    expect(&s, "leave the slab");
}
