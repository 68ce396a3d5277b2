/*
 * Source of one elementwise program; the expressions are the text of those in simd/simd.h. Sizes are constants in the
 * source, so that the compiler turns divisions by them into multiplications. Compiled sources are found by their text.
 */
#include "generate.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "libs/jit.h"

#ifdef ONT_MATH_PATH
__asm__(".pushsection .rodata\n.global ont_math_text\n.hidden ont_math_text\nont_math_text:\n.incbin \"" ONT_MATH_PATH
        "\"\n.byte 0\n.popsection\n");
#endif

struct ont_generated {
    void *function;
    int vector;          /* elements for each thread */
    int16_t align[ONT_EW_OPERANDS + ONT_EW_RESULTS]; /* alignment of each address, in bytes */
};

enum { SOURCE_BYTES = 48 << 10, VECTOR = 4 };

typedef struct text {
    char *at;
    size_t used;
    bool full;
} text;

static __attribute__((format(printf, 2, 3))) void add(text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = SOURCE_BYTES - t->used;
    int n = t->full ? 0 : vsnprintf(t->at + t->used, room, format, arguments);
    va_end(arguments);
    t->full |= n < 0 || (size_t)n >= room;
    if (!t->full) t->used += (size_t)n;
}

static const char *const expressions[ONT_LOOP_COUNT] = {
#define X(name, expression) [ONT_LOOP_##name] = #expression,
    ONT_UNARY_FLOAT_LIST(X) ONT_UNARY_NUMBER_LIST(X) ONT_BINARY_FLOAT_LIST(X) ONT_BINARY_NUMBER_LIST(X)
        ONT_COMPARE_LIST(X)
#undef X
};

/* The C type of a value of the dtype; NULL: the program is interpreted. */
static const char *type_of(int dtype)
{
    switch (dtype) {
    case ONT_FLOAT32: return "float";
    case ONT_FLOAT64: return "double";
    case ONT_FLOAT16:
    case ONT_BFLOAT16: return "uint16_t";
    case ONT_INT32: return "int32_t";
    case ONT_INT64: return "int64_t";
    case ONT_BOOL: return "uint8_t";
    default: return NULL;
    }
}

static bool is_half(int dtype)
{
    return dtype == ONT_FLOAT16 || dtype == ONT_BFLOAT16;
}

/*
 * Dropout nodes differ in their stream alone, so the stream is a kernel argument, and one kernel serves all layers. Of
 * a PyTorch layout, the numbers that are divided by stay in the source.
 */
#define FIXED(stream) ((stream) & ONT_LAYOUT_TORCH ? (stream) & ~((UINT64_C(1) << ONT_LAYOUT_BLOCKS) - 1) : 0)

/* Sets the streams of the steps before `last`; `streams` gets those of all. */
static int read_streams(const ont_ew *e, int last, uint64_t *streams)
{
    int n = 0;
    for (int j = 0; j < last; j++) {
        if (e->steps[j].kind != ONT_EW_DROPOUT) continue;
        if (streams && n < ONT_JIT_STREAMS) streams[n] = e->steps[j].stream ^ FIXED(e->steps[j].stream);
        n++;
    }
    return n;
}

static bool can_generate(const ont_ew *e)
{
    for (int j = 0; j < e->n_steps; j++) {
        const ont_ew_step *s = &e->steps[j];
        bool half = is_half(s->in) || is_half(s->out), whole = s->in != ONT_FLOAT32 && s->in != ONT_FLOAT64;
        if (!type_of(s->in) || !type_of(s->out)) return false;
        if (s->kind == ONT_EW_CAST && !(half && (s->in == ONT_FLOAT32 || s->out == ONT_FLOAT32))) return false;
        if (s->kind == ONT_EW_DROPOUT && s->in != ONT_FLOAT32) return false;
        if (s->kind == ONT_EW_BINARY && (half || (whole && s->loop == ONT_LOOP_Div))) return false;
        if (s->kind == ONT_EW_UNARY && half) return false;
        if (s->kind > ONT_EW_CAST) return false;
    }
    return e->count > 0 && read_streams(e, e->n_steps, NULL) <= ONT_JIT_STREAMS;
}

/* The dtypes of the operands follow from the steps that read them; the condition of Where is bool. */
static bool operand_types(const ont_ew *e, int *types)
{
    for (int k = 0; k < e->n_operands; k++) types[k] = ONT_UNDEFINED;
    for (int j = 0; j < e->n_steps; j++)
        for (int k = 0; k < e->steps[j].n_operands; k++) {
            int from = e->steps[j].operand[k];
            if (from < e->n_operands) types[from] = e->steps[j].kind == ONT_EW_WHERE && !k ? ONT_BOOL : e->steps[j].in;
        }
    for (int k = 0; k < e->n_operands; k++)
        if (types[k] != ONT_UNDEFINED && !type_of(types[k])) return false;
    return true;
}

static bool is_dense(const ont_ew *e, int operand)
{
    return e->rank <= 1 && (!e->rank || e->strides[operand][0] == 1);
}

static bool is_single(const ont_ew *e, int operand)
{
    for (int d = 0; d < e->rank; d++)
        if (e->strides[operand][d]) return false;
    return true;
}

/* Four elements for each thread, where every operand is either of full size or a scalar. */
static int vector_of(const ont_ew *e)
{
    for (int k = 0; k < e->n_operands; k++)
        if (!is_dense(e, k) && !is_single(e, k)) return 1;
    return e->count % VECTOR ? 1 : VECTOR;
}

static void add_operand(text *t, const ont_ew *e, int k, int dtype, int vector)
{
    const char *type = type_of(dtype);
    if (is_single(e, k)) {
        add(t, "    const %s x%d = ((const %s *)g.in[%d])[0];\n", type, k, type, k);
    } else if (vector > 1) {
        add(t, "    const ont_vector<%s> w%d = ((const ont_vector<%s> *)g.in[%d])[piece];\n", type, k, type, k);
    } else if (is_dense(e, k)) {
        add(t, "    const %s x%d = ((const %s *)g.in[%d])[piece];\n", type, k, type, k);
    } else {
        add(t, "    const %s x%d = ((const %s *)g.in[%d])[0", type, k, type, k);
        for (int d = 0; d < e->rank; d++)
            if (e->strides[k][d]) add(t, " + (int64_t)i%d * %" PRId64, d, e->strides[k][d]);
        add(t, "];\n");
    }
}

static void add_name(text *t, const ont_ew *e, int operand)
{
    operand >= e->n_operands ? add(t, "v%d", operand - e->n_operands) : add(t, "x%d", operand);
}

static void add_dropout(text *t, const ont_ew *e, int j)
{
    const ont_ew_step *s = &e->steps[j];
    int at = read_streams(e, j, NULL);
    if (s->stream & ONT_LAYOUT_TORCH)
        add(t, "; v%d = ont_dropout_word(random, g.stream[%d] | %" PRIu64 "ull, element)", j, at, FIXED(s->stream));
    else
        add(t, "; v%d = ont_philox_word(random[0], g.stream[%d], element)", j, at);
    add(t, " >= %uu ? a * (float)%.17g : 0.0f; }\n", (unsigned)(uint32_t)s->p[0], s->p[1]);
}

static void add_step(text *t, const ont_ew *e, int j)
{
    const ont_ew_step *s = &e->steps[j];
    const char *in = type_of(s->in), *out = type_of(s->out);
    add(t,
        "    %s v%d; { typedef %s NUM; const NUM P0 = (NUM)%.17g, P1 = (NUM)%.17g; (void)P0; (void)P1;\n"
        "      const %s a = ",
        out, j, in,
        s->p[0], s->p[1], s->kind == ONT_EW_WHERE ? "uint8_t" : in);
    add_name(t, e, s->operand[0]);
    for (int k = 1; k < s->n_operands; k++) {
        add(t, "; const %s %c = ", in, "abc"[k]);
        add_name(t, e, s->operand[k]);
    }
    switch (s->kind) {
    case ONT_EW_WHERE: add(t, "; v%d = a ? b : c; }\n", j); break;
    case ONT_EW_DROPOUT: add_dropout(t, e, j); break;
    case ONT_EW_CAST:
        add(t, "; v%d = %s%s(a); }\n", j, is_half(s->in) ? (s->in == ONT_FLOAT16 ? "ont_f16" : "ont_bf16")
            : "ont_float", is_half(s->in) ? "_to_float" : s->out == ONT_FLOAT16 ? "_to_f16" : "_to_bf16");
        break;
    default: add(t, "; v%d = (%s)(%s); }\n", j, out, expressions[s->loop]); break;
    }
}

static void add_body(text *t, const ont_ew *e, const int *types, int vector)
{
    for (int k = 0; k < e->n_results; k++)
        if (vector > 1) add(t, "    ont_vector<%s> y%d;\n", type_of(e->steps[e->result[k]].out), k);
    for (int k = 0; k < e->n_operands; k++)
        if (types[k] != ONT_UNDEFINED) add_operand(t, e, k, types[k], vector);
    if (vector > 1) add(t, "#pragma unroll\n    for (int lane = 0; lane < %d; lane++) {\n", vector);
    add(t, "    const int64_t element = piece * %d + %s; (void)element;\n", vector, vector > 1 ? "lane" : "0");
    for (int k = 0; k < e->n_operands && vector > 1; k++)
        if (types[k] != ONT_UNDEFINED && !is_single(e, k))
            add(t, "    const %s x%d = w%d.v[lane];\n", type_of(types[k]), k, k);
    for (int j = 0; j < e->n_steps; j++) add_step(t, e, j);
    for (int k = 0; k < e->n_results; k++) {
        const char *type = type_of(e->steps[e->result[k]].out);
        if (vector > 1)
            add(t, "    y%d.v[lane] = v%d;\n", k, e->result[k]);
        else
            add(t, "    ((%s *)g.out[%d])[piece] = v%d;\n", type, k, e->result[k]);
    }
    if (vector > 1) add(t, "    }\n");
    for (int k = 0; k < e->n_results && vector > 1; k++)
        add(t, "    ((ont_vector<%s> *)g.out[%d])[piece] = y%d;\n", type_of(e->steps[e->result[k]].out), k, k);
}

static void add_source(text *t, const ont_ew *e, const int *types, int vector, const ont_jit *jit)
{
    bool random = read_streams(e, e->n_steps, NULL) > 0;
    add(t, "/* %d */\n%s", jit->target(), jit->preamble); /* part of the text by which sources are found */
    add(t, "%s", ont_math_text);
    add(t,
        "template <class T> struct __align__(sizeof(T) * %d) ont_vector { T v[%d]; };\n"
        "struct ont_args { const void *in[%d]; void *out[%d]; const uint64_t *seed; int64_t n; uint64_t stream[%d]; "
        "};\n"
        "extern \"C\" __global__ void __launch_bounds__(%d) ont_fused(const ont_args g)\n{\n"
        "  const uint64_t random[3] = {%s}; (void)random;\n"
        "  for (int64_t piece = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; piece < g.n; piece += "
        "(int64_t)gridDim.x * blockDim.x) {\n",
        VECTOR, VECTOR, ONT_EW_OPERANDS, ONT_EW_RESULTS, ONT_JIT_STREAMS, ONT_JIT_THREADS,
        random ? "g.seed[0], g.seed[1], g.seed[2]" : "0, 0, 0");
    if (vector == 1 && e->rank > 1) {
        const char *index = e->count <= INT32_MAX ? "uint32_t" : "uint64_t";
        add(t, "    %s rest = (%s)piece;\n", index, index);
        for (int d = e->rank - 1; d >= 0; d--)
            add(t, "    const %s i%d = rest %% %" PRId64 "; rest /= %" PRId64 "; (void)i%d;\n", index, d, e->dims[d],
                e->dims[d], d);
    } else if (vector == 1 && e->rank == 1) {
        add(t, "    const int64_t i0 = piece; (void)i0;\n");
    }
    add_body(t, e, types, vector);
    add(t, "  }\n}\n");
}

/* ---- compiled sources ---- */

typedef struct compiled {
    struct compiled *next;
    void *function; /* NULL: the compiler refused it, and that was logged once */
    char source[];
} compiled;

static compiled *known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static ont_status compile(const ont_jit *jit, const text *t, compiled **result)
{
    compiled *c = ont_malloc(sizeof *c + t->used + 1);
    if (!c) return ONT_ENOMEM;
    c->function = NULL;
    memcpy(c->source, t->at, t->used + 1);
    if (jit->compile(c->source, &c->function) != ONT_OK)
        ont_log(ONT_LOG_WARNING, "an elementwise group is interpreted: %s", ont_error_message());
    c->next = known;
    known = c;
    *result = c;
    return ONT_OK;
}

static ont_status find_or_compile(const ont_jit *jit, const text *t, void **function)
{
    ont_status status = ONT_OK;
    pthread_mutex_lock(&lock);
    compiled *c = known;
    while (c && strcmp(c->source, t->at)) c = c->next;
    if (!c) status = compile(jit, t, &c);
    if (status == ONT_OK) *function = c->function;
    pthread_mutex_unlock(&lock);
    return status;
}

ont_status ont_generate(const ont_ew *e, ont_generated **generated)
{
    const ont_jit *jit = ont_jit_get();
    int types[ONT_EW_OPERANDS], vector = vector_of(e);
    *generated = NULL;
    if (!jit || !can_generate(e) || !operand_types(e, types)) return ONT_OK;
    text t = {.at = ont_malloc(SOURCE_BYTES)};
    if (!t.at) return ONT_ENOMEM;
    add_source(&t, e, types, vector, jit);
    void *function = NULL;
    ont_status status = t.full ? ONT_OK : find_or_compile(jit, &t, &function);
    ont_free(t.at);
    if (status != ONT_OK || !function) return status;
    ont_generated *made = ont_calloc(1, sizeof *made);
    if (!made) return ONT_ENOMEM;
    made->function = function;
    made->vector = vector;
    for (int k = 0; k < e->n_operands; k++)
        made->align[k] = (int16_t)(e->size[k] * (vector > 1 && !is_single(e, k) ? vector : 1));
    for (int k = 0; k < e->n_results; k++)
        made->align[ONT_EW_OPERANDS + k] = (int16_t)((int)ont_dtype_size((ont_dtype)e->steps[e->result[k]].out) *
                                                     vector);
    *generated = made;
    return ONT_OK;
}

bool ont_generated_fits(const ont_generated *g, const ont_ew *e)
{
    for (int k = 0; k < e->n_operands; k++)
        if ((uintptr_t)e->in[k] % (uintptr_t)g->align[k]) return false;
    for (int k = 0; k < e->n_results; k++)
        if ((uintptr_t)e->out[k] % (uintptr_t)g->align[ONT_EW_OPERANDS + k]) return false;
    return true;
}

ont_status ont_generated_run(const ont_generated *g, const ont_ew *e, void *stream)
{
    ont_jit_args args = {.seed = e->seed, .n = e->count / g->vector};
    int64_t blocks = (args.n + ONT_JIT_THREADS - 1) / ONT_JIT_THREADS;
    read_streams(e, e->n_steps, args.stream);
    memcpy(args.in, e->in, sizeof args.in);
    memcpy(args.out, e->out, sizeof args.out);
    return ont_jit_get()->launch(g->function, (unsigned)(blocks > 1 << 20 ? 1 << 20 : blocks), &args, stream);
}

void ont_generated_destroy(ont_generated *generated)
{
    ont_free(generated);
}
