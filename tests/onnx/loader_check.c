/*
 * The loader and the writer without Python, so that they run under sanitizers wherever the tests run. test_load.py and
 * fuzz.py build it from csrc/base, csrc/ir and csrc/onnx; the operator table is the stand-in below.
 *
 *   loader_check stream          models from stdin, each after its size in 8 little-endian bytes; a line of answer each
 *   loader_check sweep FILE      every allocation fails in turn: ENOMEM, nothing left, until the load succeeds
 *   loader_check save FILE OUT   loads and writes
 *   loader_check text FILE       loads and prints
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "onnx/load.h"
#include "onnx/save.h"
#include "ops/op.h"

static const ont_op dropout = {.domain = "", .name = "Dropout", .since = 12, .flags = ONT_OP_RANDOM};

const ont_op *ont_op_find(const char *domain, const char *name, int64_t version)
{
    return !*domain && !strcmp(name, "Dropout") && version >= dropout.since ? &dropout : NULL;
}

static bool read_exactly(FILE *file, void *to, size_t n)
{
    return fread(to, 1, n, file) == n;
}

/* Load, save, load again, save again: both files must be the same. */
static ont_status round_trip(const uint8_t *bytes, size_t size)
{
    ont_graph *first = NULL, *second = NULL;
    uint8_t *saved = NULL, *again = NULL;
    size_t n_saved = 0, n_again = 0;
    ont_status status;
    ONT_TRYGOTO(status, done, ont_onnx_load(bytes, size, &first));
    ONT_TRYGOTO(status, done, ont_onnx_save(first, &saved, &n_saved));
    status = ont_context(ont_onnx_load(saved, n_saved, &second), "what was saved");
    if (status != ONT_OK && status != ONT_ENOMEM) status = ONT_EINTERNAL;
    if (status != ONT_OK) goto done;
    ONT_TRYGOTO(status, done, ont_onnx_save(second, &again, &n_again));
    if (n_saved != n_again || memcmp(saved, again, n_saved))
        status = ont_fail(ONT_EINTERNAL, "saved twice, %zu and %zu bytes that differ", n_saved, n_again);
done:
    ont_free(again);
    ont_free(saved);
    ont_graph_destroy(second);
    ont_graph_destroy(first);
    return status;
}

static int stream(void)
{
    uint64_t size;
    while (read_exactly(stdin, &size, sizeof size)) {
        uint8_t *bytes = malloc(size ? size : 1); /* exactly as long: a read past the end is seen */
        if (!bytes || !read_exactly(stdin, bytes, size)) return 1;
        ont_status status = round_trip(bytes, size);
        if (ont_alloc_live()) /* once there, it is reported for every later model too */
            printf("LEAK %" PRId64 " blocks\n", ont_alloc_live());
        else
            printf("%s %s\n", ont_status_name(status), status == ONT_OK ? "" : ont_error_message());
        fflush(stdout);
        free(bytes);
    }
    return 0;
}

static int sweep(const uint8_t *bytes, size_t size)
{
    for (int64_t n = 0;; n++) {
        ont_alloc_fail_after(n);
        ont_status status = round_trip(bytes, size);
        bool fired = ont_alloc_fail_fired();
        ont_alloc_fail_after(-1);
        if (ont_alloc_live() || status != (fired ? ONT_ENOMEM : ONT_OK)) {
            printf("allocation %" PRId64 ": %s, %s; %" PRId64 " blocks left\n", n, ont_status_name(status),
                   ont_error_message(), ont_alloc_live());
            return 1;
        }
        if (!fired) return printf("%" PRId64 " allocations\n", n), 0;
    }
}

static int convert(const uint8_t *bytes, size_t size, const char *out)
{
    ont_graph *graph;
    uint8_t *saved = NULL;
    size_t n = 0;
    char *text = NULL;
    ont_status status = ont_onnx_load(bytes, size, &graph);
    if (status != ONT_OK) return printf("%s %s\n", ont_status_name(status), ont_error_message()), 1;
    status = out ? ont_onnx_save(graph, &saved, &n) : ont_graph_print(graph, &text);
    FILE *file = out ? fopen(out, "wb") : stdout;
    if (status == ONT_OK && file) fwrite(out ? (void *)saved : (void *)text, 1, out ? n : strlen(text), file);
    if (out && file) fclose(file);
    ont_free(saved);
    ont_free(text);
    ont_graph_destroy(graph);
    return status != ONT_OK;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "stream")) return stream();
    FILE *file = argc > 2 ? fopen(argv[2], "rb") : NULL;
    if (!file) return 2;
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(size ? size : 1);
    int result = 2;
    if (bytes && read_exactly(file, bytes, size))
        result = !strcmp(argv[1], "sweep") ? sweep(bytes, size) : convert(bytes, size, argc > 3 ? argv[3] : NULL);
    fclose(file);
    free(bytes);
    return result;
}
