/*
 * Micro-kernels and the macro-kernel over them. gemm_kernel.inc.c includes this once per variant; the includer defines:
 *
 *   T(name)                     the name of a function of this variant
 *   W(write), W(store)          epilogue of one row of a micro-tile, and of a block (defined before)
 *   UNPACKED_A                  1: A is read as stored, (m, k); 0: from packed panels
 *   KR                          elements of k in one step: 1, or 2 for pairs of bfloat16
 *   BROADCAST(a)                the vector that holds *a in all lanes
 *   MULTIPLY_ADD(sum, x, line)  sum + x * line for KR elements of k
 */
#if UNPACKED_A
/* One pointer for three rows of A: x86 addresses base + {0, 1, 2} * lda. */
#define ROW_POINTERS const float *row[(MR + 2) / 3]; for (int g = 0; 3 * g < MR; g++) row[g] = a + 3 * g * p->lda
#define ELEMENT(r) (row[(r) / 3] + (r) % 3 * p->lda)
#define NEXT_ELEMENTS for (int g = 0; 3 * g < rows; g++) row[g]++
#else
#define ROW_POINTERS (void)0
#define ELEMENT(r) (a + (r))
#define NEXT_ELEMENTS a += MR
#endif

/* Stores the sums of a micro-tile, added to those in acc where p->accumulate, through the epilogue or to acc. */
INLINE void T(write_tile)(const ont_gemm_block *p, float *acc, const ont_gemm_epilogue *e, vec sum[MR][2],
                          const int rows, const int vectors)
{
    if (p->accumulate) /* blocks of k are summed separately: this bounds the rounding error of a long sum */
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] += load(acc + r * p->ld_acc + v * LANES);
#if UNPACKED_A
    if (e && e->trans_c) {
        write_trans_c(e, sum, rows);
        return;
    }
#endif
    for (int r = 0; r < rows; r++)
        if (e) {
            W(write)(e, r, sum[r]);
        } else {
            for (int v = 0; v < vectors; v++) store(acc + r * p->ld_acc + v * LANES, sum[r][v]);
        }
}

INLINE void T(microkernel)(const ont_gemm_block *p, const float *a, const float *b, float *acc,
                           const ont_gemm_epilogue *e, const prefetch_list *next, const tile_size size)
{
    const int rows = size.m, vectors = size.vectors;
    ROW_POINTERS;
    vec sum[MR][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
#define STEP \
    do { \
        vec b0 = load(b), b1 = vectors > 1 ? load(b + LANES) : b0; \
        for (int r = 0; r < rows; r++) { \
            vec x = BROADCAST(ELEMENT(r)); \
            sum[r][0] = MULTIPLY_ADD(sum[r][0], x, b0); \
            if (vectors > 1) sum[r][1] = MULTIPLY_ADD(sum[r][1], x, b1); \
        } \
        NEXT_ELEMENTS; \
        b += NR; \
    } while (0)
    int64_t steps = p->k / KR, k = 0;
    if (e) { /* prefetch the lines of C that will be written, one row per step of k */
        const int64_t size = e->c_is_bf16 ? 2 : 4, width = (e->trans_c ? rows : NR) * size;
        const char *c = e->c;
        for (int64_t last = ont_min(steps, e->trans_c ? NR : rows); k < last; k++, c += e->ldc * size) {
            __builtin_prefetch(c, 1);
            __builtin_prefetch(c + width / 2, 1);
            __builtin_prefetch(c + width - 1, 1);
            STEP;
        }
    }
#if UNPACKED_A
    (void)next;
#else
    int64_t last = ont_min(steps, k + next->lines_a);
    for (const float *line = next->a; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
    last = ont_min(steps, k + next->lines_b);
    for (const float *line = next->b; k < last; k++, line += LINE) {
        __builtin_prefetch(line, 0, 2);
        STEP;
    }
#endif
#pragma GCC unroll 4
    for (; k < steps; k++) STEP;
#undef STEP
    T(write_tile)(p, acc, e, sum, rows, vectors);
}

#define MICROKERNEL(rows) \
    static void T(full_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *acc, \
                               const ont_gemm_epilogue *e, const prefetch_list *next) \
    { \
        T(microkernel)(p, a, b, acc, e, next, (tile_size){.m = rows, .vectors = 2}); \
    } \
    static void T(narrow_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *acc, \
                                 const ont_gemm_epilogue *e, const prefetch_list *next) \
    { \
        (void)e; \
        T(microkernel)(p, a, b, acc, NULL, next, (tile_size){.m = rows, .vectors = 1}); \
    }
#define FULL(rows) T(full_##rows),
#define NARROW(rows) T(narrow_##rows),
FOR_EACH_MR(MICROKERNEL)
/* [vectors - 1][rows]. A last panel with at most LANES columns needs one vector. */
static const microkernel_fn T(microkernels)[2][MR + 1] = {{NULL, FOR_EACH_MR(NARROW)}, {NULL, FOR_EACH_MR(FULL)}};
#undef MICROKERNEL
#undef FULL
#undef NARROW

#if UNPACKED_A
/* n <= 2 elements of A, repeated over a vector as (a[0], a[1], a[0], ...). */
INLINE vec T(pair)(const float *a, int64_t n)
{
    typedef int64_t words __attribute__((vector_size(sizeof(vec))));
    int64_t both = 0;
    memcpy(&both, a, (size_t)n * sizeof *a);
    return (vec)(both + (words){0});
}

/* An interleaved tail panel: lanes 2 j and 2 j + 1 sum even and odd k of column j. */
INLINE void T(tail_microkernel)(const ont_gemm_block *p, const float *a, const float *b, float *acc, const int rows)
{
    ROW_POINTERS;
    vec sum[MR];
    for (int r = 0; r < rows; r++) sum[r] = (vec){0};
    int64_t k = 0;
#pragma GCC unroll 4
    for (; k + 2 <= p->k; k += 2, b += LANES) {
        vec line = load(b);
        for (int r = 0; r < rows; r++) sum[r] = MULTIPLY_ADD(sum[r], T(pair)(ELEMENT(r), 2), line);
        for (int g = 0; 3 * g < rows; g++) row[g] += 2;
    }
    for (int r = 0; r < rows; r++) {
        if (k < p->k) sum[r] = MULTIPLY_ADD(sum[r], T(pair)(ELEMENT(r), 1), load(b));
        float *to = acc + r * p->ld_acc;
        for (int j = 0; j < TAIL; j++) to[j] = sum[r][2 * j] + sum[r][2 * j + 1] + (p->accumulate ? to[j] : 0);
    }
}

#define TAIL_MICROKERNEL(rows) \
    static void T(tail_##rows)(const ont_gemm_block *p, const float *a, const float *b, float *acc, \
                               const ont_gemm_epilogue *e, const prefetch_list *next) \
    { \
        (void)e, (void)next; \
        T(tail_microkernel)(p, a, b, acc, rows); \
    }
#define NAME(rows) T(tail_##rows),
FOR_EACH_MR(TAIL_MICROKERNEL)
static const microkernel_fn T(tail_microkernels)[MR + 1] = {NULL, FOR_EACH_MR(NAME)};
#undef TAIL_MICROKERNEL
#undef NAME

/* MR rows of A stay in L1 while the loop goes over all panels of B. */
static void T(multiply)(const ont_gemm_block *p)
{
    int64_t whole = p->last_k && !p->epilogue.nontemporal ? p->n / NR * NR : 0;
    for (int64_t i = 0; i < p->m; i += MR) {
        const float *a = (const float *)p->a + i * p->lda;
        int64_t rows = ont_min(MR, p->m - i);
        for (int64_t j = 0; j < p->n; j += NR) {
            ont_gemm_epilogue e = epilogue_at(&p->epilogue, i, j);
            const bool tail = p->interleave_tail && p->n - j <= TAIL;
            const microkernel_fn run = tail ? T(tail_microkernels)[rows] : T(microkernels)[p->n - j > LANES][rows];
            run(p, a, (const float *)p->b + j * p->k, p->acc + i * p->ld_acc + j, j < whole ? &e : NULL, NULL);
        }
    }
    if (!p->last_k || whole == p->n) return;
    ont_gemm_epilogue rest = epilogue_at(&p->epilogue, 0, whole);
    (p->epilogue.trans_c ? store_trans_c : W(store))(p->acc + whole, p->ld_acc, p->m, p->n - whole, &rest);
}
#else
/*
 * A panel of B stays in L1 while the loop goes over all panels of A, and prefetches the next panels into L2. Full
 * micro-tiles write their result at once; nontemporal stores go in long rows at the end.
 */
static void T(multiply)(const ont_gemm_block *p)
{
    int64_t steps = p->k / KR, panels = (p->m + MR - 1) / MR, lines_a = steps * MR / LINE,
            lines_b = steps * NR / LINE, share = (lines_b + panels - 1) / panels,
            at_once = p->last_k && !p->epilogue.nontemporal && !p->epilogue.trans_c ? p->n / NR * NR : 0;
    for (int64_t j = 0; j < p->n; j += NR) {
        const float *b = (const float *)p->b + j * steps;
        for (int64_t i = 0, panel = 0; i < p->m; i += MR, panel++) {
            const float *a = (const float *)p->a + i * steps;
            ont_gemm_epilogue e = epilogue_at(&p->epilogue, i, j);
            prefetch_list next = {0};
            if (!j && i + MR < p->m) next.a = a + MR * steps, next.lines_a = lines_a;
            if (j + NR < p->n)
                next.b = b + NR * steps + panel * share * LINE,
                next.lines_b = ont_min(share, lines_b - panel * share);
            const microkernel_fn run = T(microkernels)[p->n - j > LANES][ont_min(MR, p->m - i)];
            run(p, a, b, p->acc + i * p->ld_acc + j, j < at_once ? &e : NULL, &next);
        }
    }
    if (!p->last_k || at_once == p->n) return;
    ont_gemm_epilogue rest = epilogue_at(&p->epilogue, 0, at_once);
    (p->epilogue.trans_c ? store_trans_c : W(store))(p->acc + at_once, p->ld_acc, p->m, p->n - at_once, &rest);
}

#endif

#undef ROW_POINTERS
#undef ELEMENT
#undef NEXT_ELEMENTS
#undef W
#undef UNPACKED_A
#undef T
#undef KR
#undef BROADCAST
#undef MULTIPLY_ADD
