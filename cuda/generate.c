/*
 * Source of one elementwise program; the expressions are the text of those in simd/simd.h. Sizes are constants in the
 * source, so that the compiler turns divisions by them into multiplications. Compiled sources are found by their text.
 */
#include "generate.h"

#include <inttypes.h>
#include <math.h>
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

/* Elements of one thread: 8 make accesses of 16 bytes of 16-bit elements, but need many registers. */
enum { SOURCE_BYTES = 64 << 10, MAX_VECTOR = 8, MAX_WIDE = 6 };

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
    case ONT_INT8: return "int8_t";
    case ONT_INT16: return "int16_t";
    case ONT_INT32: return "int32_t";
    case ONT_INT64: return "int64_t";
    case ONT_UINT16: return "uint16_t";
    case ONT_UINT32: return "uint32_t";
    case ONT_UINT64: return "uint64_t";
    case ONT_BOOL:
    case ONT_UINT8: return "uint8_t";
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

static bool is_random(const ont_ew_step *s)
{
    return s->kind == ONT_EW_DROPOUT || s->kind == ONT_EW_MASK;
}

/* Gives each random step its place in the kernel's list of streams, by step; steps of one stream share it. Returns the
 * number of streams. `streams` may be NULL. */
static int read_streams(const ont_ew *e, int *places, uint64_t *streams)
{
    uint64_t seen[ONT_EW_STEPS];
    int n = 0;
    for (int j = 0; j < e->n_steps; j++) {
        int at = 0;
        if (!is_random(&e->steps[j])) continue;
        while (at < n && seen[at] != e->steps[j].stream) at++;
        if (at == n) seen[n++] = e->steps[j].stream;
        places[j] = at;
        if (streams && at < ONT_JIT_STREAMS) streams[at] = seen[at] ^ FIXED(seen[at]);
    }
    return n;
}

/* A division or remainder of integers reports zeros, which only the interpreter does. No step computes in 16-bit
 * floats: Casts stand around it. */
static bool can_generate(const ont_ew *e)
{
    int places[ONT_EW_STEPS];
    for (int j = 0; j < e->n_steps; j++) {
        const ont_ew_step *s = &e->steps[j];
        bool whole = s->in != ONT_FLOAT32 && s->in != ONT_FLOAT64;
        if (!type_of(s->in) || !type_of(s->out) || s->kind == ONT_EW_MOD) return false;
        if (s->kind == ONT_EW_BINARY && (is_half(s->in) || (whole && s->loop == ONT_LOOP_Div))) return false;
        if ((s->kind == ONT_EW_UNARY || s->kind == ONT_EW_CLIP) && is_half(s->in)) return false;
    }
    return e->count > 0 && read_streams(e, places, NULL) <= ONT_JIT_STREAMS;
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

/* ---- how operands are read ---- */

static bool is_dense(const ont_ew *e, int operand)
{
    int64_t dense = 1;
    for (int d = e->rank - 1; d >= 0; dense *= e->dims[d--])
        if (e->dims[d] != 1 && e->strides[operand][d] != dense) return false;
    return true;
}

static bool is_single(const ont_ew *e, int operand)
{
    for (int d = 0; d < e->rank; d++)
        if (e->strides[operand][d]) return false;
    return true;
}

/* One value for all elements of a row, but not for all rows. */
static bool is_constant_in_rows(const ont_ew *e, int operand)
{
    return !e->strides[operand][e->rank - 1] && !is_single(e, operand);
}

/* Whether `vector` elements, which lie in one row, can be read by one access, or are one value. */
static bool is_vector(const ont_ew *e, int operand, int vector)
{
    int last = e->rank - 1;
    if (is_dense(e, operand) || is_single(e, operand) || is_constant_in_rows(e, operand)) return true;
    if (e->strides[operand][last] != 1) return false;
    for (int d = 0; d < last; d++)
        if (e->strides[operand][d] % vector) return false;
    return true;
}

static int vector_of(const ont_ew *e, const int *types)
{
    size_t least = 8;
    for (int k = 0; k < e->n_operands; k++)
        if (types[k] != ONT_UNDEFINED && !is_single(e, k) && (size_t)e->size[k] < least) least = (size_t)e->size[k];
    for (int k = 0; k < e->n_results; k++) {
        size_t size = ont_dtype_size((ont_dtype)e->steps[e->result[k]].out);
        if (size < least) least = size;
    }
    int vector = least <= 2 && e->n_operands + e->n_results <= MAX_WIDE ? MAX_VECTOR : MAX_VECTOR / 2;
    while (vector > 1) {
        bool fits = e->rank && e->dims[e->rank - 1] % vector == 0;
        for (int k = 0; k < e->n_operands; k++) fits = fits && is_vector(e, k, vector);
        if (fits) break;
        vector /= 2;
    }
    return vector;
}

static void add_operand(text *t, const ont_ew *e, int k, int dtype, int vector)
{
    const char *type = type_of(dtype);
    if (is_single(e, k)) {
        add(t, "    const %s x%d = ((const %s *)g.in[%d])[0];\n", type, k, type, k);
        return;
    }
    bool vectors = vector > 1 && !is_constant_in_rows(e, k);
    if (vectors)
        add(t, "    const ont_vector<%s> w%d = ((const ont_vector<%s> *)g.in[%d])[", type, k, type, k);
    else
        add(t, "    const %s x%d = ((const %s *)g.in[%d])[", type, k, type, k);
    if (is_dense(e, k)) {
        add(t, "piece];\n");
        return;
    }
    add(t, "0");
    for (int d = 0; d < e->rank; d++) {
        int64_t stride = e->strides[k][d];
        if (stride) add(t, " + (int64_t)i%d * %" PRId64, d, vectors && d < e->rank - 1 ? stride / vector : stride);
    }
    add(t, "];\n");
}

static void add_name(text *t, const ont_ew *e, int operand)
{
    operand >= e->n_operands ? add(t, "v%d", operand - e->n_operands) : add(t, "x%d", operand);
}

static void add_stream(text *t, uint64_t stream, int place)
{
    if (stream & ONT_LAYOUT_TORCH) /* the mask tells the compiler which bits come from the argument */
        add(t, "(g.stream[%d] & %" PRIu64 "ull) | %" PRIu64 "ull", place, ~FIXED(UINT64_MAX), FIXED(stream));
    else
        add(t, "g.stream[%d]", place);
}

/* Whether each block of four random words is of four neighbours, which a vector then computes once. */
static bool shares_words(uint64_t stream, int vector)
{
    return vector >= 4 && (!(stream & ONT_LAYOUT_TORCH) || (stream >> ONT_LAYOUT_LANES & 3) >= 2);
}

/* The random words of a vector's elements, by place of the stream. */
static void add_words(text *t, const ont_ew *e, const int *places, int vector)
{
    int n = 0;
    for (int j = 0; j < e->n_steps; j++) {
        uint64_t stream = e->steps[j].stream;
        if (!is_random(&e->steps[j]) || places[j] < n) continue;
        n++;
        if (!shares_words(stream, vector)) continue;
        add(t, "    uint32_t r%d[%d];\n#pragma unroll\n    for (int k = 0; k < %d; k += 4) ont_dropout_block(random, ",
            places[j], vector, vector);
        add_stream(t, stream, places[j]);
        add(t, ", piece * %d + k, r%d + k);\n", vector, places[j]);
    }
}

/* Whether the element is kept. */
static void add_kept(text *t, const ont_ew_step *s, int place, int vector)
{
    if (shares_words(s->stream, vector)) {
        add(t, "r%d[lane]", place);
    } else {
        add(t, "ont_dropout_word(random, ");
        add_stream(t, s->stream, place);
        add(t, ", element)");
    }
    add(t, " >= %uu", (unsigned)(uint32_t)s->p[0]);
}

static void add_cast(text *t, const ont_ew_step *s)
{
    const char *half = s->in == ONT_FLOAT16 || s->out == ONT_FLOAT16 ? "f16" : "bf16";
    if (s->in == s->out)
        add(t, "a");
    else if (is_half(s->in) && s->out == ONT_FLOAT32)
        add(t, "ont_%s_to_float(a)", half);
    else if (is_half(s->out) && s->in == ONT_FLOAT32)
        add(t, "ont_float_to_%s(a)", half);
    else
        add(t, "ont_value<%s>(ont_cast(%d, %d, ont_bits<%s>(a)))", type_of(s->out), s->in, s->out, type_of(s->in));
}

static void add_number(text *t, double number)
{
    if (isnan(number))
        add(t, "(NUM)(0.0 / 0.0)");
    else if (isinf(number))
        add(t, "(NUM)(%s1e308 * 10)", number < 0 ? "-" : "");
    else
        add(t, "(NUM)%.17g", number);
}

static void add_expression(text *t, const ont_ew_step *s, int place, int vector)
{
    switch (s->kind) {
    case ONT_EW_WHERE: add(t, "a ? b : c"); break;
    case ONT_EW_DROPOUT:
        add_kept(t, s, place, vector);
        add(t, " ? a * P1 : (NUM)0");
        break;
    case ONT_EW_MASK: add_kept(t, s, place, vector); break;
    case ONT_EW_CAST: add_cast(t, s); break;
    case ONT_EW_AND: add(t, "a && b"); break;
    case ONT_EW_OR: add(t, "a || b"); break;
    case ONT_EW_XOR: add(t, "!a != !b"); break;
    case ONT_EW_NOT: add(t, "!a"); break;
    case ONT_EW_ISNAN: add(t, "ont_is_nan(%d, ont_bits<%s>(a))", s->in, type_of(s->in)); break;
    case ONT_EW_ISINF:
        add(t, "ont_is_inf(%d, ont_bits<%s>(a), %d, %d)", s->in, type_of(s->in), s->p[0] != 0, s->p[1] != 0);
        break;
    case ONT_EW_BITS:
        if (s->p[0] >= ONT_EW_BITS_LEFT)
            add(t, "vshift<NUM>(a, b, %d)", s->p[0] == ONT_EW_BITS_LEFT);
        else
            add(t, s->p[0] == ONT_EW_BITS_NOT ? "~a" : "a %c b", "&|^"[s->p[0] == ONT_EW_BITS_NOT ? 0 : (int)s->p[0]]);
        break;
    case ONT_EW_DIVIDE: add(t, "a / P0"); break;
    case ONT_EW_CLIP: add(t, "(a < b ? b : a) > c ? c : a < b ? b : a"); break;
    default: add(t, "(%s)(%s)", type_of(s->out), expressions[s->loop]); break;
    }
}

static void add_step(text *t, const ont_ew *e, int j, int place, int vector)
{
    const ont_ew_step *s = &e->steps[j];
    const char *in = type_of(s->in), *out = type_of(s->out);
    add(t, "    %s v%d; { typedef %s NUM; const NUM P0 = ", out, j, in);
    add_number(t, is_random(s) ? 0 : s->p[0]);
    add(t, ", P1 = ");
    add_number(t, s->p[1]);
    add(t, "; (void)P0; (void)P1;\n      const %s a = ", s->kind == ONT_EW_WHERE ? "uint8_t" : in);
    add_name(t, e, s->operand[0]);
    for (int k = 1; k < s->n_operands; k++) {
        add(t, "; const %s %c = ", in, "abc"[k]);
        add_name(t, e, s->operand[k]);
    }
    if (s->kind == ONT_EW_MASK) add(t, "; (void)a");
    add(t, "; v%d = ", j);
    add_expression(t, s, place, vector);
    add(t, "; }\n");
}

static void add_results(text *t, const ont_ew *e, int vector)
{
    for (int k = 0; k < e->n_results; k++) {
        const char *type = type_of(e->steps[e->result[k]].out);
        if (vector > 1)
            add(t, "    ((ont_vector<%s> *)g.out[%d])[piece] = y%d;\n", type, k, k);
        else
            add(t, "    ((%s *)g.out[%d])[piece] = v%d;\n", type, k, e->result[k]);
    }
}

static void add_body(text *t, const ont_ew *e, const int *types, int vector)
{
    int places[ONT_EW_STEPS] = {0};
    read_streams(e, places, NULL);
    for (int k = 0; k < e->n_results; k++)
        if (vector > 1) add(t, "    ont_vector<%s> y%d;\n", type_of(e->steps[e->result[k]].out), k);
    for (int k = 0; k < e->n_operands; k++)
        if (types[k] != ONT_UNDEFINED) add_operand(t, e, k, types[k], vector);
    add_words(t, e, places, vector);
    if (vector > 1) add(t, "#pragma unroll\n    for (int lane = 0; lane < %d; lane++) {\n", vector);
    add(t, "    const int64_t element = piece * %d + %s; (void)element;\n", vector, vector > 1 ? "lane" : "0");
    for (int k = 0; k < e->n_operands && vector > 1; k++)
        if (types[k] != ONT_UNDEFINED && !is_single(e, k) && !is_constant_in_rows(e, k))
            add(t, "    const %s x%d = w%d.v[lane];\n", type_of(types[k]), k, k);
    for (int j = 0; j < e->n_steps; j++) add_step(t, e, j, places[j], vector);
    for (int k = 0; k < e->n_results && vector > 1; k++) add(t, "    y%d.v[lane] = v%d;\n", k, e->result[k]);
    if (vector > 1) add(t, "    }\n");
    add_results(t, e, vector);
}

/* Indices of the element, or of the vector, in each dim. */
static void add_indices(text *t, const ont_ew *e, int vector)
{
    const char *index = e->count <= INT32_MAX ? "uint32_t" : "uint64_t";
    bool indexed = false;
    for (int k = 0; k < e->n_operands; k++) indexed = indexed || (!is_dense(e, k) && !is_single(e, k));
    if (!indexed) return;
    add(t, "    %s rest = (%s)piece;\n", index, index);
    for (int d = e->rank - 1; d >= 0; d--) {
        int64_t n = d == e->rank - 1 ? e->dims[d] / vector : e->dims[d];
        add(t, "    const %s i%d = rest %% %" PRId64 "; rest /= %" PRId64 "; (void)i%d;\n", index, d, n, n, d);
    }
}

static void add_source(text *t, const ont_ew *e, const int *types, int vector, const ont_jit *jit)
{
    int places[ONT_EW_STEPS];
    bool random = read_streams(e, places, NULL) > 0;
    add(t, "/* %d */\n%s", jit->target(), jit->preamble); /* part of the text by which sources are found */
    add(t, "%s", ont_math_text);
    add(t,
        "template <class T> struct __align__(sizeof(T) * %d < 16 ? sizeof(T) * %d : 16) ont_vector { T v[%d]; };\n"
        "struct ont_args { const void *in[%d]; void *out[%d]; const uint64_t *seed; int64_t n; uint64_t stream[%d]; "
        "};\n"
        "extern \"C\" {\n__global__ void __launch_bounds__(%d) ont_fused(const ont_args g)\n{\n"
        "  const uint64_t random[3] = {%s}; (void)random;\n"
        "  for (int64_t piece = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; piece < g.n; piece += "
        "(int64_t)gridDim.x * blockDim.x) {\n",
        vector, vector, vector, ONT_EW_OPERANDS, ONT_EW_RESULTS, ONT_JIT_STREAMS, ONT_JIT_THREADS,
        random ? "g.seed[0], g.seed[1], g.seed[2]" : "0, 0, 0");
    add_indices(t, e, vector);
    add_body(t, e, types, vector);
    add(t, "  }\n}\n}\n");
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

static int16_t alignment(int size, int vector)
{
    return (int16_t)(size * vector < 16 ? size * vector : 16);
}

ont_status ont_generate(const ont_ew *e, ont_generated **generated)
{
    const ont_jit *jit = ont_jit_get();
    int types[ONT_EW_OPERANDS];
    *generated = NULL;
    if (!jit || !can_generate(e) || !operand_types(e, types)) return ONT_OK;
    int vector = vector_of(e, types);
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
        made->align[k] = alignment(e->size[k], is_single(e, k) || is_constant_in_rows(e, k) ? 1 : vector);
    for (int k = 0; k < e->n_results; k++)
        made->align[ONT_EW_OPERANDS + k] =
            alignment((int)ont_dtype_size((ont_dtype)e->steps[e->result[k]].out), vector);
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
    int places[ONT_EW_STEPS];
    read_streams(e, places, args.stream);
    memcpy(args.in, e->in, sizeof args.in);
    memcpy(args.out, e->out, sizeof args.out);
    return ont_jit_get()->launch(g->function, (unsigned)(blocks > 1 << 20 ? 1 << 20 : blocks), &args, stream);
}

void ont_generated_destroy(ont_generated *generated)
{
    ont_free(generated);
}
