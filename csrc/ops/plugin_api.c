/*
 * The function table of plugin_api.h.
 */
#include "ops/plugin_api.h"

const ont_core ont_core_table = {
    .version = 1,
#define X(name) .name = ont_##name,
    ONT_CORE_LIST(X)
#undef X
};
