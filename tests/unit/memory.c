/*
 * A plan of memory shares what it may, and overwrites nothing that is still read.
 */
#include "machine.h"

TEST(plan_chain_in_place)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *v[6];
    v[0] = op(&m, "F", x, NULL, 16, 1, 0);
    for (int i = 1; i < 6; i++) v[i] = op(&m, "F", v[i - 1], NULL, 16, 1, 0);
    ont_value *sum = op(&m, "G", v[5], NULL, 1, 0, 0);
    plan(&m, &sum, 1, 1, m.n_steps);
    CHECK(location_of(&m, x).kind == ONT_LOCATION_INPUT && location_of(&m, x).index == 0);
    CHECK(location_of(&m, sum).kind == ONT_LOCATION_OUTPUT && location_of(&m, sum).index == 0 &&
          !m.plan.copied_outputs[0]);
    for (int i = 0; i < 6; i++) CHECK(same_location(&m, v[i], v[0]) && location_of(&m, v[i]).kind == ONT_LOCATION_SLAB);
    CHECK_INT(m.plan.inplace_count, 5); /* not over the input, which is the caller's */
    CHECK_INT(m.plan.slab_bytes, 64);
    end(&m);
}

TEST(plan_not_in_place)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0);
    ont_value *later = op(&m, "F", a, NULL, 16, 1, 0); /* a is read again */
    ont_value *wide = op(&m, "F", a, NULL, 32, 1, 0);  /* of another size */
    ont_value *no = op(&m, "F", wide, NULL, 32, 0, 0); /* the kernel cannot */
    ont_value *alias = op(&m, "View", no, NULL, 32, 0, 0);
    ont_value *both = op(&m, "F", no, alias, 32, 1, 0); /* the other operand is the same storage */
    ont_value *square = op(&m, "F", both, both, 32, 3, 0); /* the same value twice, over either: elementwise, so it may */
    ont_value *moved = op(&m, "F", square, square, 32, 1, 0); /* over one alone: the kernel reads the other anywhere */
    ont_value *end_ = op(&m, "G", moved, later, 1, 3, 0);
    plan(&m, &end_, 1, 1, m.n_steps);
    CHECK(!same_location(&m, a, later) && !same_location(&m, a, wide) && !same_location(&m, wide, no));
    CHECK(same_location(&m, no, alias) && !same_location(&m, no, both));
    CHECK(same_location(&m, both, square) && !same_location(&m, square, moved));
    CHECK_INT(m.plan.inplace_count, 1);
    end(&m);
}

TEST(plan_views_share_and_live_long)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0);
    ont_value *v = op(&m, "View", a, NULL, 16, 0, 0), *w = op(&m, "View", v, NULL, 16, 0, 0);
    ont_value *b = op(&m, "F", x, NULL, 16, 0, 0), *c = op(&m, "F", b, NULL, 16, 0, 0);
    ont_value *d = op(&m, "F", w, c, 16, 0, 0);
    ont_value *of_input = op(&m, "View", x, NULL, 16, 0, 0), *e = op(&m, "F", of_input, d, 16, 1, 0);
    plan(&m, &e, 1, 1, m.n_steps);
    CHECK(same_location(&m, a, v) && same_location(&m, a, w));
    CHECK(!same_location(&m, a, b) && !same_location(&m, a, c)); /* a is live through w */
    CHECK(same_location(&m, of_input, x) && location_of(&m, of_input).kind == ONT_LOCATION_INPUT);
    CHECK(location_of(&m, e).kind == ONT_LOCATION_OUTPUT);
    end(&m);
}

TEST(plan_outputs)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16);
    ont_value *a = op(&m, "F", x, NULL, 16, 0, 0), *alias = op(&m, "View", a, NULL, 16, 0, 0);
    ont_value *b = op(&m, "F", a, NULL, 16, 1, 0);
    ont_value *split_at = op(&m, "F", b, NULL, 16, 1, 0);
    uint32_t split = m.n_steps;
    ont_value *back = op(&m, "F", split_at, NULL, 16, 1, 0);
    /* a, the same through a view, an input, and b once as it is; backward: one of its own, and one of forward's. */
    ont_value *outputs[] = {a, alias, x, b, back, split_at};
    plan(&m, outputs, 6, 4, split);
    const bool *copied = m.plan.copied_outputs;
    CHECK(!copied[0] && copied[1] && copied[2] && !copied[3] && !copied[4] && copied[5]);
    CHECK(location_of(&m, a).kind == ONT_LOCATION_OUTPUT && location_of(&m, a).index == 0 &&
          same_location(&m, a, alias));
    CHECK(location_of(&m, b).kind == ONT_LOCATION_OUTPUT && location_of(&m, b).index == 3);
    CHECK(location_of(&m, back).kind == ONT_LOCATION_OUTPUT && location_of(&m, back).index == 4);
    CHECK(location_of(&m, split_at).kind == ONT_LOCATION_SLAB); /* computed by forward, given out by backward */
    CHECK_INT(m.plan.inplace_count, 0);
    end(&m);
}

TEST(plan_delivered_gradients)
{
    model m;
    begin(&m);
    ont_value *weight = input(&m, 16), *bias = input(&m, 16), *x = input(&m, 16);
    ont_value *y = op(&m, "F", x, weight, 16, 0, 0);
    ont_value *early = op(&m, "F", y, NULL, 16, 0, 0), *late = op(&m, "F", early, weight, 16, 3, 0);
    ont_value *last = op(&m, "F", late, NULL, 16, 1, 0);
    /* The gradient of weight is final before the step that reads weight, which must not be overwritten before. */
    ont_value *outputs[] = {y, early, last, x};
    m.delivered[1] = weight;
    m.delivered[2] = bias;
    m.delivered[3] = x;
    plan(&m, outputs, 4, 1, 1);
    CHECK_INT(m.plan.deliver_before[1], 3);
    CHECK_INT(m.plan.deliver_before[2], 4);
    CHECK(m.plan.deliver_before[0] == ONT_PLAN_BLOCK && m.plan.deliver_before[3] == ONT_PLAN_BLOCK);
    CHECK(location_of(&m, early).kind == ONT_LOCATION_SLAB && !same_location(&m, early, late));
    CHECK(location_of(&m, last).kind == ONT_LOCATION_SLAB && m.plan.copied_outputs[3] && !m.plan.copied_outputs[2]);
    CHECK_INT(m.plan.slab_bytes, 128);
    end(&m);
}

TEST(plan_unused_values_have_no_location)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *a = op(&m, "F", x, NULL, 16, 0, 0), *removed = op(&m, "View", x, NULL, 16, 0, 0);
    ont_graph_remove_node(m.g, removed->def);
    removed->has_shape = false;
    plan(&m, &a, 1, 1, 1);
    CHECK(location_of(&m, removed).kind == ONT_LOCATION_NONE);
    CHECK_INT(m.plan.slab_bytes, 0);
    end(&m);
}

TEST(plan_random_models_keep_what_is_read)
{
    double ratio = 0, shared = 0;
    int rounds = 3000, counted = 0;
    for (int round = 0; round < rounds; round++) {
        model m;
        begin(&m);
        random_model(&m);
        execute_plan(&m);
        shared += m.plan.inplace_count;
        if (m.plan.lower_bound) {
            ratio += (double)m.plan.slab_bytes / (double)m.plan.lower_bound;
            counted++;
        }
        end(&m);
    }
    printf("slab over lower bound, mean: %.4f; %.2f shared in place a model\n", ratio / counted, shared / rounds);
    CHECK(ratio / counted < 1.1 && shared / rounds > 1);
}

TEST(plan_allocation_failures)
{
    model m;
    begin(&m);
    random_model(&m);
    int64_t live = ont_alloc_live();
    for (int k = 0;; k++) {
        ont_arena arena;
        ont_arena_init(&arena);
        ont_plan left = {.slab_bytes = 12345};
        ont_alloc_fail_after(k);
        ont_plan_input in = input_of(&m, m.steps);
        ont_status status = ont_plan_memory(&in, &arena, &left);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        CHECK_INT(status, fired ? ONT_ENOMEM : ONT_OK);
        CHECK(left.slab_bytes == (fired ? 12345 : m.plan.slab_bytes));
        ont_arena_deinit(&arena);
        CHECK_INT(ont_alloc_live(), live);
        if (!fired) break;
        CHECK(k < 100);
    }
    end(&m);
}
