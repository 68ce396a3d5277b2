/*
 * Generated kernels where kernels are emulated: ONT_EMULATE_JIT holds a command that compiles them, such as "c++ ... -o
 * %s %s" for library and source. Without it, they are interpreted.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "libs/jit.h"
#include "emulate/contract.h"
#include "emulate/devices.h"

bool ont_emulate_recording(void);
int ont_emulate_record(int (*work)(void *), void *context, void (*forget)(void *));

static const char preamble[] = "#include \"kernels/launch.cuh\"\n";

static const char footer[] = "extern \"C\" __attribute__((visibility(\"default\"))) int ont_fused_launch(unsigned "
                             "blocks, const ont_args *args)\n"
                             "{\n    return ONT_LAUNCH(ont_fused, blocks, 256, 0, nullptr, *args);\n}\n";

static ont_status compile(const char *source, void **function)
{
    char folder[] = "/tmp/ont_jit_XXXXXX", in[64], out[64], command[4096];
    ont_emulate_outside_capture("cudaLibraryLoadData");
    if (!mkdtemp(folder)) return ont_fail(ONT_EIO, "no folder for a generated kernel");
    snprintf(in, sizeof in, "%s/kernel.cc", folder);
    snprintf(out, sizeof out, "%s/kernel.so", folder);
    FILE *file = fopen(in, "w");
    if (!file) return ont_fail(ONT_EIO, "%s cannot be written", in);
    fputs(source, file);
    fputs(footer, file);
    fclose(file);
    const char *given = getenv("ONT_EMULATE_JIT"), *library = given ? strstr(given, "%s") : NULL;
    const char *input = library ? strstr(library + 2, "%s") : NULL;
    if (!input) return ont_fail(ONT_EINVAL, "ONT_EMULATE_JIT has no two places for paths");
    snprintf(command, sizeof command, "%.*s%s%.*s%s%s", (int)(library - given), given, out, (int)(input - library - 2),
             library + 2, in, input + 2);
    int failed = system(command);
    void *opened = failed ? NULL : dlopen(out, RTLD_NOW | RTLD_LOCAL);
    void *symbol = opened ? dlsym(opened, "ont_fused_launch") : NULL;
    unlink(in);
    unlink(out);
    rmdir(folder);
    if (!symbol) return ont_fail(ONT_EINTERNAL, "a generated kernel does not compile: %s", command);
    *function = symbol;
    return ONT_OK;
}

typedef struct launched {
    int (*run)(unsigned, const ont_jit_args *);
    unsigned blocks;
    ont_jit_args args;
} launched;

static int do_launch(void *context)
{
    const launched *l = context;
    ont_emulate_begin_work("ont_fused");
    int error = l->run(l->blocks, &l->args);
    ont_emulate_end_work();
    return error;
}

/* The library of a generated kernel has an emulation of its own, which does not record graphs. */
static ont_status launch(void *function, unsigned blocks, ont_jit_args *args, void *stream)
{
    launched l = {.blocks = blocks, .args = *args};
    ont_emulate_check_stream("ont_fused", stream);
    memcpy(&l.run, &function, sizeof l.run);
    if (!ont_emulate_recording())
        return do_launch(&l) ? ont_fail(ONT_ESTATE, "a generated kernel was not launched") : ONT_OK;
    launched *kept = malloc(sizeof *kept);
    if (!kept) return ont_fail(ONT_ENOMEM, "out of memory");
    *kept = l;
    ont_emulate_record(do_launch, kept, free);
    return ONT_OK;
}

static int target(void)
{
    return 0;
}

static const ont_jit jit = {preamble, target, compile, launch};

const ont_jit *ont_jit_get(void)
{
    return getenv("ONT_EMULATE_JIT") ? &jit : NULL;
}
