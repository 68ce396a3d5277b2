/*
 * An order of steps computes before it reads, and is near the best of all orders.
 */
#include "machine.h"

/* Puts the steps of both phases into the order chosen for them, which is one of their own, and plans again. */
static void reorder(model *m, bool from_end)
{
    uint32_t order[MOST_STEPS + 1];
    bool taken[MOST_STEPS] = {false};
    ont_plan_step steps[MOST_STEPS];
    ont_plan_input in = input_of(m, m->steps);
    CHECK_OK(ont_plan_order(&in, 0, m->split, from_end, order));
    CHECK_OK(ont_plan_order(&in, m->split, m->n_steps, from_end, order));
    for (uint32_t t = 0; t < m->n_steps; t++) {
        CHECK(order[t] < m->n_steps && !taken[order[t]] && (order[t] < m->split) == (t < m->split));
        taken[order[t]] = true;
        steps[t] = m->steps[order[t]];
    }
    memcpy(m->steps, steps, m->n_steps * sizeof *steps);
    CHECK_OK(ont_plan_memory(&in, &m->arena, &m->plan));
}

/* No step before one whose result it reads, through views or not. */
static void check_order(const model *m)
{
    static bool produced[4096];
    memset(produced, 0, sizeof produced);
    for (uint32_t t = 0; t < m->n_steps; t++) {
        const ont_node *node = m->steps[t].node;
        for (uint32_t i = 0; i < node->n_inputs; i++) {
            const ont_value *v = node->inputs[i].value;
            while (v->kind == ONT_VALUE_NODE && is_view(v->def)) v = v->def->inputs[0].value;
            CHECK(v->kind != ONT_VALUE_NODE || produced[v->id]);
        }
        produced[node->outputs[0]->id] = true;
    }
}

TEST(order_one_branch_after_the_other)
{
    model m;
    begin(&m);
    ont_value *x = input(&m, 16), *wide[4], *narrow[4];
    for (int i = 0; i < 4; i++) wide[i] = op(&m, "F", x, NULL, 64, 0, 0);
    for (int i = 0; i < 4; i++) {
        ont_value *from = i & 1 ? op(&m, "View", wide[i], NULL, 64, 0, 0) : wide[i];
        narrow[i] = op(&m, "F", from, NULL, 16, 0, 0);
    }
    ont_value *a = op(&m, "F", narrow[0], narrow[1], 16, 0, 0), *b = op(&m, "F", narrow[2], narrow[3], 16, 0, 0);
    ont_value *sum = op(&m, "F", a, b, 1, 0, 0);
    plan(&m, &sum, 1, 1, m.n_steps);
    CHECK_INT(m.plan.slab_bytes, 4 * 256 + 64);
    reorder(&m, true);
    check_order(&m);
    CHECK_INT(m.plan.slab_bytes, 256 + 4 * 64); /* one wide value; the sums wait for all results */
    reorder(&m, false);
    check_order(&m);
    CHECK_INT(m.plan.slab_bytes, 256 + 3 * 64); /* the last one, its result and the one before, and a sum */
    end(&m);
}

/* Peak of live bytes of the order that memory.c plans for these steps. */
static size_t bound_of(model *m, const ont_plan_step *steps)
{
    ont_arena arena;
    ont_plan plan;
    ont_arena_init(&arena);
    ont_plan_input in = input_of(m, steps);
    CHECK_OK(ont_plan_memory(&in, &arena, &plan));
    ont_arena_deinit(&arena);
    return plan.lower_bound;
}

/*
 * The smallest peak over all orders of a model whose steps are all forward: every order in which producers come first.
 */
static size_t best_order(model *m, ont_plan_step *chosen, uint32_t n, uint32_t taken, size_t best)
{
    if (n == m->n_steps) {
        size_t bound = bound_of(m, chosen);
        return bound < best ? bound : best;
    }
    for (uint32_t t = 0; t < m->n_steps; t++) {
        if (taken >> t & 1) continue;
        bool possible = true;
        for (uint32_t u = 0; u < m->n_steps && possible; u++) {
            const ont_node *node = m->steps[t].node;
            for (uint32_t i = 0; i < node->n_inputs; i++) {
                const ont_value *v = node->inputs[i].value;
                while (v->kind == ONT_VALUE_NODE && is_view(v->def)) v = v->def->inputs[0].value;
                possible &= v->def != m->steps[u].node || taken >> u & 1;
            }
        }
        if (!possible) continue;
        chosen[n] = m->steps[t];
        best = best_order(m, chosen, n + 1, taken | 1u << t, best);
    }
    return best;
}

TEST(order_against_all_orders)
{
    enum { ROUNDS = 150, STEPS = 7 };
    double ratio = 0, given = 0;
    int optimal = 0;
    for (int round = 0; round < ROUNDS; round++) {
        model m;
        begin(&m);
        ont_value *values[STEPS + 1] = {input(&m, 16)}, *last = NULL;
        for (int k = 1; k < STEPS; k++) {
            ont_value *a = values[check_between(0, k - 1)],
                      *b = check_between(0, 2) ? NULL : values[check_between(0, k - 1)];
            values[k] = op(&m, "F", a, b, counts[check_between(0, 5)], 0, 0);
        }
        for (int k = 1; k < STEPS; k++)
            if (!values[k]->uses) last = last ? op(&m, "F", last, values[k], 1, 0, 0) : values[k];
        plan(&m, &last, 1, 1, m.n_steps);
        if (m.n_steps > STEPS + 1) { /* too many orders */
            end(&m);
            continue;
        }
        ont_plan_step chosen[MOST_STEPS];
        size_t best = best_order(&m, chosen, 0, 0, SIZE_MAX), before = m.plan.lower_bound;
        size_t now = before;
        for (int from_end = 0; from_end < 2; from_end++) {
            reorder(&m, from_end);
            check_order(&m);
            CHECK(m.plan.lower_bound >= best);
            if (m.plan.lower_bound < now) now = m.plan.lower_bound; /* as run/schedule.c takes it */
        }
        optimal += now == best;
        ratio += best ? (double)now / (double)best : 1;
        given += best ? (double)before / (double)best : 1;
        end(&m);
    }
    printf("bytes alive over the best order's, mean of %d: %.3f, %.3f as given; %d are best\n", ROUNDS, ratio / ROUNDS,
           given / ROUNDS, optimal);
    CHECK(ratio < given);
}

TEST(order_random_models_keep_what_is_read)
{
    int better = 0, rounds = 2000;
    for (int round = 0; round < rounds; round++) {
        model m;
        begin(&m);
        random_model(&m);
        size_t before = m.plan.slab_bytes;
        reorder(&m, round & 1);
        check_order(&m);
        execute_plan(&m);
        better += m.plan.slab_bytes < before;
        end(&m);
    }
    printf("%d of %d models have a smaller slab in another order\n", better, rounds);
    CHECK(better > rounds / 10);
}

TEST(order_allocation_failures)
{
    model m;
    begin(&m);
    random_model(&m);
    uint32_t order[MOST_STEPS + 1];
    int64_t live = ont_alloc_live();
    for (int k = 0;; k++) {
        ont_alloc_fail_after(k);
        ont_plan_input in = input_of(&m, m.steps);
        ont_status status = ont_plan_order(&in, 0, m.split, true, order);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        CHECK_INT(status, fired ? ONT_ENOMEM : ONT_OK);
        CHECK_INT(ont_alloc_live(), live);
        if (!fired) break;
        CHECK(k < 100);
    }
    end(&m);
}
