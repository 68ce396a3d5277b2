/*
 * Inlines calls of the model's functions: the nodes of the body are loaded in place of the call, with names that begin
 * with the call's. See loader.h. Nesting is limited and cycles are refused, so the size of a model is bounded.
 */
#include <inttypes.h>
#include <string.h>

#include "onnx/loader.h"
#include "ops/op.h"

#define TEXT ont_onnx_text

/* ---- the table of functions ---- */

static char *function_key(ont_loader *l, const char *domain, const char *name, const char *overload)
{
    return ont_arena_format(&l->g->arena, "%s\n%s\n%s", ont_onnx_domain(domain), TEXT(name), TEXT(overload));
}

ont_status ont_onnx_list_functions(ont_loader *l, const Onnx__ModelProto *model)
{
    for (size_t i = 0; i < model->n_functions; i++) {
        Onnx__FunctionProto *f = model->functions[i];
        char *key = function_key(l, f->domain, f->name, f->overload);
        if (!key) return ONT_ENOMEM;
        if (!*TEXT(f->name)) return ont_fail(ONT_EINVAL, "function %zu has no name", i);
        if (ont_map_get(&l->functions, key))
            return ont_fail(ONT_EINVAL, "function '%s' of domain '%s' is defined twice", f->name, TEXT(f->domain));
        ONT_TRY(ont_map_put(&l->functions, key, f));
    }
    return ONT_OK;
}

ont_status ont_onnx_function(ont_loader *l, const Onnx__NodeProto *node, const Onnx__FunctionProto **function)
{
    *function = NULL;
    if (!l->functions.used) return ONT_OK;
    char *key = function_key(l, node->domain, node->op_type, node->overload);
    if (!key) return ONT_ENOMEM;
    *function = ont_map_get(&l->functions, key);
    return ONT_OK;
}

/* ---- the scope of one call ---- */

static const Onnx__AttributeProto *find_attribute(Onnx__AttributeProto *const *list, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(TEXT(list[i]->name), name)) return list[i];
    return NULL;
}

/* Binds every attribute that the function declares to the call's value or the default. */
static ont_status bind_attributes(ont_loader *l, const ont_onnx_scope *caller, const Onnx__NodeProto *call,
                                  const Onnx__FunctionProto *f, const char *what, ont_onnx_scope *scope)
{
    size_t n = f->n_attribute + f->n_attribute_proto;
    if (n > ONT_MAX_ATTRIBUTES) return ont_fail(ONT_EINVAL, "%s: the function has %zu attributes", what, n);
    ont_binding *bound = ont_arena_array(&l->g->arena, n + 1, sizeof *bound);
    if (!bound) return ONT_ENOMEM;
    size_t given = 0;
    for (size_t i = 0; i < n; i++) {
        const Onnx__AttributeProto *default_value = i < f->n_attribute ? NULL : f->attribute_proto[i - f->n_attribute];
        bound[i].name = TEXT(default_value ? default_value->name : f->attribute[i]);
        for (size_t j = 0; j < i; j++)
            if (!strcmp(bound[j].name, bound[i].name))
                return ont_fail(ONT_EINVAL, "%s: the function has two attributes '%s'", what, bound[i].name);
        const Onnx__AttributeProto *own = find_attribute(call->attribute, call->n_attribute, bound[i].name);
        if (own) {
            ONT_TRY(ont_onnx_resolve(caller, what, own, &own));
            given++;
        }
        bound[i].value = own ? own : default_value;
    }
    if (given != call->n_attribute)
        return ont_fail(ONT_EINVAL, "%s: the call has %zu attributes, but the function declares only %zu of them", what,
                        call->n_attribute, given);
    scope->attributes = bound;
    scope->n_attributes = n;
    return ONT_OK;
}

static ont_status bind_inputs(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                              const Onnx__FunctionProto *f, const char *what, ont_onnx_scope *scope)
{
    if (call->n_input > f->n_input || call->n_output > f->n_output)
        return ont_fail(ONT_EINVAL, "%s: the call has %zu inputs and %zu outputs, the function has %zu and %zu", what,
                        call->n_input, call->n_output, f->n_input, f->n_output);
    for (size_t i = 0; i < f->n_input; i++) {
        ont_value *value = NULL;
        if (!*TEXT(f->input[i])) return ont_fail(ONT_EINVAL, "%s: input %zu of the function has no name", what, i);
        if (i < call->n_input) ONT_TRY(ont_onnx_input(l, caller, what, call->input[i], &value));
        ONT_TRY(ont_onnx_define(scope, f->input[i], value ? value : &ont_onnx_absent));
    }
    return ONT_OK;
}

/* Determines, before the body is loaded, the name of each result in the graph: names[i], NULL for unused results. */
static ont_status name_results(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                               const Onnx__FunctionProto *f, const char *what, ont_onnx_scope *scope,
                               const char **names)
{
    for (size_t i = 0; i < call->n_output; i++) {
        const char *outside = TEXT(call->output[i]), *inside = TEXT(f->output[i]);
        if (!*outside) continue;
        if (ont_map_get(&caller->values, outside))
            return ont_fail(ONT_EINVAL, "%s: the name of its output '%s' is already defined", what, outside);
        ONT_TRY(ont_onnx_name(l, caller, outside, &names[i]));
        if (!ont_map_get(&scope->results, inside)) ONT_TRY(ont_map_put(&scope->results, inside, (void *)names[i]));
    }
    return ONT_OK;
}

/* Calls are charged too, since the declarations of a function are processed in each call. */
ont_status ont_onnx_charge(ont_loader *l, const char *what, size_t nodes)
{
    l->n_inlined += nodes;
    if (l->n_inlined <= ONT_MAX_INLINED && l->g->arena.bytes <= l->max_bytes) return ONT_OK;
    return ont_fail(ONT_EINVAL, "%s: the model's functions expand to more than %d nodes or %zu bytes", what,
                    ONT_MAX_INLINED, l->max_bytes);
}

static ont_status bind_results(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                               const Onnx__FunctionProto *f,
                               const char *what, const ont_onnx_scope *scope, const char *const *names)
{
    for (size_t i = 0; i < call->n_output; i++) {
        if (!names[i]) continue;
        ont_value *value = ont_map_get(&scope->values, TEXT(f->output[i]));
        if (!value || value == &ont_onnx_absent)
            return ont_fail(ONT_EINVAL, "%s: output '%s' of the function is not computed", what, TEXT(f->output[i]));
        /* The body did not create it under this name: an input passed through, or one value returned twice. */
        if (value->name != names[i]) ONT_TRY(ont_onnx_copy(l, names[i], value, &value));
        ONT_TRY(ont_onnx_define(caller, call->output[i], value));
    }
    return ONT_OK;
}

static ont_status check_nesting(const ont_onnx_scope *caller, const Onnx__FunctionProto *f, const char *what)
{
    for (const ont_onnx_scope *s = caller; s; s = s->caller)
        if (s->function == f) return ont_fail(ONT_EINVAL, "%s: function '%s' calls itself", what, f->name);
    if (caller->depth >= ONT_MAX_CALL_DEPTH)
        return ont_fail(ONT_EINVAL, "%s: functions are nested deeper than %d", what, ONT_MAX_CALL_DEPTH);
    return ONT_OK;
}

ont_status ont_onnx_inline(ont_loader *l, ont_onnx_scope *caller, const Onnx__NodeProto *call,
                           const Onnx__FunctionProto *f,
                           const char *what)
{
    ONT_TRY(check_nesting(caller, f, what));
    ONT_TRY(ont_onnx_charge(l, what, 1 + (f->n_input + f->n_output + f->n_attribute + f->n_attribute_proto) / 16));
    ont_onnx_scope scope = {.caller = caller, .function = f, .depth = caller->depth + 1, .opsets = f->opset_import,
                            .n_opsets = f->n_opset_import};
    const char *name = *TEXT(call->name) ? call->name : f->name;
    scope.where = ont_arena_format(&l->g->arena, "%s in function '%s': ", what, f->name);
    scope.prefix = ont_arena_format(&l->g->arena, "%s%s/", caller->prefix, name);
    const char **names = ont_arena_array(&l->g->arena, call->n_output + 1, sizeof *names);
    if (!scope.where || !scope.prefix || !names) return ONT_ENOMEM;
    ont_status status;
    ONT_TRYGOTO(status, done, ont_onnx_check_opsets(&scope));
    ONT_TRYGOTO(status, done, bind_attributes(l, caller, call, f, what, &scope));
    ONT_TRYGOTO(status, done, bind_inputs(l, caller, call, f, what, &scope));
    ONT_TRYGOTO(status, done, name_results(l, caller, call, f, what, &scope, names));
    ONT_TRYGOTO(status, done, ont_onnx_nodes(l, &scope, f->node, f->n_node));
    status = bind_results(l, caller, call, f, what, &scope, names);
done:
    ont_map_deinit(&scope.values);
    ont_map_deinit(&scope.results);
    return status;
}
