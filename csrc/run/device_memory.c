/*
 * Memory and streams of a device. See device_memory.h.
 */
#include "run/device_memory.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "run/run.h"

ont_status ont_device_alloc(const ont_device *device, size_t bytes, ont_memory *memory)
{
    ont_scope scope;
    *memory = (ont_memory){0};
    if (!device) {
        memory->data = ont_buffer_alloc(bytes);
        return memory->data ? ONT_OK : ONT_ENOMEM;
    }
    ONT_TRY(ont_device_enter(device, &scope));
    ont_status status = device->ops->alloc(device, bytes ? bytes : 1, ONT_UINT8, memory);
    memory->stream = scope.stream;
    ont_device_leave(device, &scope);
    return status;
}

void ont_device_free(const ont_device *device, ont_memory *memory, size_t bytes)
{
    if (!memory->data) return;
    if (device)
        device->ops->free(device, memory, bytes ? bytes : 1);
    else
        ont_buffer_free(memory->data, bytes);
    *memory = (ont_memory){0};
}

static bool is_captured(const ont_device *device, void *stream)
{
    return device->ops->capturing && device->ops->capturing(device, stream);
}

bool ont_device_wait_for_use(const ont_device *device, const ont_memory *memory, void *last)
{
    ont_scope scope;
    if (!device || !memory->data || last == memory->stream) return true;
    if (ont_device_enter(device, &scope) != ONT_OK) return false;
    /* An event would become a part of the capture. */
    bool captured = is_captured(device, memory->stream) || is_captured(device, last);
    bool waits = !captured && device->ops->join(device, memory->stream, last) == ONT_OK;
    ont_device_leave(device, &scope);
    if (!waits) ont_log(ONT_LOG_WARNING, "no stream can wait for the last use of device memory");
    return waits;
}

void ont_device_free_after(const ont_device *device, ont_memory *memory, size_t bytes, void *last)
{
    if (ont_device_wait_for_use(device, memory, last)) ont_device_free(device, memory, bytes);
    *memory = (ont_memory){0};
}

ont_status ont_device_enter(const ont_device *device, ont_scope *scope)
{
    *scope = (ont_scope){0};
    return device ? device->ops->enter(device, scope) : ONT_OK;
}

void ont_device_leave(const ont_device *device, const ont_scope *scope)
{
    if (device) device->ops->leave(device, scope);
}

ont_status ont_device_copy(const ont_device *device, void *to, const void *from, size_t bytes, void *stream)
{
    if (!bytes) return ONT_OK;
    if (device) return device->ops->copy(device, to, from, bytes, stream);
    memcpy(to, from, bytes);
    return ONT_OK;
}

ont_status ont_device_clear(const ont_device *device, void *to, size_t bytes, void *stream)
{
    if (!bytes) return ONT_OK;
    if (device) return device->ops->clear(device, to, bytes, stream);
    memset(to, 0, bytes);
    return ONT_OK;
}

ont_status ont_device_copy_view(const ont_device *device, const ont_tensor_view *view, void *to, void *stream)
{
    if (!device) {
        ont_tensor_view_copy(view, to);
        return ONT_OK;
    }
    ont_device_strided layout = {.rank = view->rank, .size = ont_dtype_size(view->dtype)};
    for (int d = 0; d < view->rank; d++) {
        if (!view->dims[d]) return ONT_OK;
        layout.dims[d] = view->dims[d];
        layout.strides[d] = view->strides[d];
    }
    return device->ops->copy_strided(device, &layout, view->data, to, stream);
}

static bool is_constant(const ont_program *p, uint32_t value)
{
    return p->plan.locations[value].kind == ONT_LOCATION_CONSTANT && p->plan.locations[value].index == value;
}

ont_status ont_device_upload_constants(ont_program *p)
{
    const ont_device *device = p->device;
    size_t total = 0;
    if (!device) return ONT_OK;
    p->constant_addresses = ont_arena_array(&p->arena, p->graph->n_values + 1, sizeof *p->constant_addresses);
    if (!p->constant_addresses) return ONT_ENOMEM;
    for (uint32_t i = 0; i < p->graph->n_values; i++)
        if (is_constant(p, i))
            total += (p->graph->values[i]->data->bytes + ONT_PLAN_ALIGN - 1) / ONT_PLAN_ALIGN * ONT_PLAN_ALIGN;
    ont_scope scope;
    ONT_TRY(ont_device_enter(device, &scope));
    ont_status status = device->ops->alloc_shared(device, sizeof *p->fault, (void **)&p->fault);
    if (status == ONT_OK) status = ont_device_alloc(device, total, &p->constants);
    p->constant_bytes = total;
    size_t at = 0;
    for (uint32_t i = 0; i < p->graph->n_values && status == ONT_OK; i++) {
        if (!is_constant(p, i)) continue;
        const ont_tensor *data = p->graph->values[i]->data;
        p->constant_addresses[i] = (char *)p->constants.data + at;
        if (data->bytes)
            status = device->ops->write(device, p->constant_addresses[i], data->data, data->bytes, scope.stream);
        at += (data->bytes + ONT_PLAN_ALIGN - 1) / ONT_PLAN_ALIGN * ONT_PLAN_ALIGN;
    }
    if (status == ONT_OK) status = device->ops->synchronize(device, scope.stream);
    ont_device_leave(device, &scope);
    return status;
}

ont_status ont_device_check_fault(const ont_program *p)
{
    ont_fault *fault = p->fault;
    if (!fault || __atomic_load_n(&fault->code, __ATOMIC_ACQUIRE) <= ONT_FAULT_NONE) return ONT_OK;
    ont_fault found = *fault;
    memset(fault, 0, sizeof *fault);
    const ont_node *node = found.step >= 0 && (uint32_t)found.step < p->n_steps ? p->steps[found.step].node : NULL;
    const char *op = node ? node->op_type : "?", *name = node ? node->name : "?";
    if (found.code == ONT_FAULT_ZERO_DIVISION)
        return ont_fail(ONT_EINVAL, "%s '%s': integer division by zero at position %" PRId64, op, name, found.position);
    if (found.code == ONT_FAULT_LENGTH)
        return ont_fail(ONT_EINDEX, "%s '%s': length %" PRId64 " of sample %" PRId64 " is outside 0 to %" PRId64, op,
                        name, found.value, found.position, found.limit);
    if (found.code == ONT_FAULT_REGION)
        return ont_fail(ONT_EINVAL, "%s '%s': region %" PRId64 " has an edge that is not less than 1e9, or bins of "
                        "more than %" PRId64 " cells", op, name, found.position, found.limit);
    if (found.code == ONT_FAULT_COUNT)
        return ont_fail(ONT_EINTERNAL, "%s '%s': %" PRId64 " elements are not zero, but %" PRId64 " were counted", op,
                        name, found.value, found.limit);
    return ont_fail(ONT_EINDEX, "%s '%s': %s %" PRId64 " at position %" PRId64 " is out of range for %" PRId64 " %s",
                    op, name, found.code == ONT_FAULT_LABEL ? "label" : "index", found.value, found.position,
                    found.limit, found.code == ONT_FAULT_LABEL ? "classes" : "entries");
}
