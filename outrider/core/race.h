/* Who wins the race over the logits of one place: what `sampling.line` and `noise.RowNoise.won` do, in one pass and without arrays.

The same law, operation by operation: logits less the largest, over the temperature, in float32; 52 bits of noise for each id, by SplitMix64's
finaliser; the noise is -log(-log(1 - w)). Exact numbers only for ids whose bound comes near the first. Settings that look at a text or leave ids
out are Python's. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PARTS 256 /* of a vocabulary: only those that hold somebody near are looked at again */
#define LINE 32 /* ids that are looked at together: fewer, and loops over them are written out one by one */
#define LEAST 64 /* ids of a part */
#define KEPT 256 /* of those who are near, how many are not worked out again */
#define GOLDEN 0x9E3779B97F4A7C15u
#define LN2 0.6931471805599453
#define SCALE 36.04365338911715 /* log(2**52): what a bound lacks, whose bits are not scaled */
#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif
#if defined(__GLIBC__) && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12 /* a cache may travel */
#define EACH_MACHINE __attribute__((target_clones("arch=x86-64-v3", "default")))
#define WIDE __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))) /* clones would have half the width */
#define IS_WIDE __builtin_cpu_supports("x86-64-v4")
#else
#define EACH_MACHINE
#define WIDE
#define IS_WIDE 0
#endif

enum { LEADER, FIRST, MASS }; /* what is asked of those who are near */
typedef struct { long token; double share; } Won;
typedef struct { const void *raw; int bytes; long vocab; double warmth; uint64_t key; double near; } Race; /* bytes: 2 bfloat16, 4 float32, 8 float64 */

INLINE double logit(Race r, long v)
{
    uint32_t wide;
    float x;
    if (r.bytes == 8)
        return ((const double *)r.raw)[v];
    if (r.bytes == 4)
        return ((const float *)r.raw)[v];
    wide = (uint32_t)((const uint16_t *)r.raw)[v] << 16;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Less the largest, over the temperature: in float32 where logits have no more. */
INLINE double scaled(Race r, long v, double top)
{
    if (r.bytes == 8)
        return (logit(r, v) - top) / r.warmth;
    return ((float)logit(r, v) - (float)top) / (float)r.warmth;
}

INLINE uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

INLINE uint64_t bits_of(uint64_t key, long v) { return mix(key + (uint64_t)(v + 1) * GOLDEN) >> 12; }

/* Of an integer of 52 bits, by what vectors can do. */
INLINE double number(uint64_t x)
{
    double out;
    x |= 0x4330000000000000u;
    memcpy(&out, &x, sizeof out);
    return out - 0x1p52;
}

/* Not less than x plus its noise, less SCALE: a logarithm read off exponent and mantissa is never too large. */
INLINE double bound(double x, uint64_t bits)
{
    double w = number(bits);
    uint64_t form;
    memcpy(&form, &w, sizeof form);
    return x - LN2 * (number(form >> 12) * 0x1p-40 - 1023);
}

INLINE double exact(double x, uint64_t bits) { return x - log(-log1p(((double)bits + 0.5) * -0x1p-52)); }

/* The largest logit; NaN where one is none. Lanes are what a compiler makes vectors of, whichever machine's. */
INLINE double largest(Race r)
{
    double most[LINE], top = -INFINITY;
    long none[LINE] = {0}, v = 0, any = 0;
    for (int i = 0; i < LINE; ++i)
        most[i] = -INFINITY;
    for (; v + LINE <= r.vocab; v += LINE)
        for (int i = 0; i < LINE; ++i) {
            double x = logit(r, v + i);
            none[i] |= x != x;
            most[i] = x > most[i] ? x : most[i];
        }
    for (int i = 0; i < LINE; ++i) {
        double x = v + i < r.vocab ? logit(r, v + i) : -INFINITY;
        any |= none[i] | (x != x);
        top = most[i] > top ? most[i] : top;
        top = x > top ? x : top;
    }
    return any ? NAN : top;
}

/* Bounds of LINE ids from `v` on, where there are so many. */
INLINE void bounds_of(Race r, double top, long v, double *out)
{
    if (v + LINE <= r.vocab)
        for (int i = 0; i < LINE; ++i)
            out[i] = bound(scaled(r, v + i, top), bits_of(r.key, v + i));
    else
        for (int i = 0; i < LINE; ++i)
            out[i] = v + i < r.vocab ? bound(scaled(r, v + i, top), bits_of(r.key, v + i)) : -INFINITY;
}

/* The largest bound of each part of so many ids, and of all. */
INLINE double bounded(Race r, double top, long size, double *most)
{
    double bounds[LINE], lanes[LINE], bar = -INFINITY;
    for (long p = 0; p * size < r.vocab; ++p) {
        for (int i = 0; i < LINE; ++i)
            lanes[i] = -INFINITY;
        for (long v = p * size; v < (p + 1) * size && v < r.vocab; v += LINE) {
            bounds_of(r, top, v, bounds);
            for (int i = 0; i < LINE; ++i)
                lanes[i] = bounds[i] > lanes[i] ? bounds[i] : lanes[i];
        }
        most[p] = lanes[0];
        for (int i = 1; i < LINE; ++i)
            most[p] = lanes[i] > most[p] ? lanes[i] : most[p];
        bar = most[p] > bar ? most[p] : bar;
    }
    return bar - 1e-9; /* vectors may round otherwise */
}

INLINE Won won_by(Race r)
{
    double most[PARTS], bounds[LINE], found[KEPT], first = -INFINITY, mass = 0;
    long size = LINE * ((r.vocab + PARTS * LINE - 1) / (PARTS * LINE)), token = -1, near = 0;
    double top = largest(r), bar;
    if (!isfinite(top))
        return (Won){-1, 0};
    size = size < LEAST ? LEAST : size;
    bar = bounded(r, top, size, most);
    for (int asked = LEADER; asked <= (near > KEPT ? MASS : FIRST); ++asked) /* each says who is near for the next */
        for (long p = 0, more = 1; more && p * size < r.vocab; ++p)
            for (long v = p * size; more && most[p] >= bar && v < (p + 1) * size && v < r.vocab; v += LINE) {
                bounds_of(r, top, v, bounds);
                for (int i = 0; more && i < LINE; ++i) {
                    double value;
                    if (bounds[i] < bar)
                        continue;
                    value = exact(scaled(r, v + i, top), bits_of(r.key, v + i));
                    if (asked == LEADER) {
                        bar = value - r.near - SCALE;
                        more = 0;
                    } else if (asked == FIRST) {
                        if (near < KEPT)
                            found[near] = value;
                        ++near;
                        token = value > first ? v + i : token;
                        first = value > first ? value : first;
                    } else if (value >= first - r.near)
                        mass += exp(value - first);
                }
            }
    for (long i = 0; near <= KEPT && i < near; ++i)
        if (found[i] >= first - r.near)
            mass += exp(found[i] - first);
    return (Won){token, 1 / mass};
}

#define OF(n) \
    WIDE static Won wide_##n(Race r) { r.bytes = n; return won_by(r); } \
    EACH_MACHINE static Won narrow_##n(Race r) { r.bytes = n; return won_by(r); } \
    static Won won_of_##n(Race r) { return IS_WIDE ? wide_##n(r) : narrow_##n(r); }
OF(2) OF(4) OF(8)

static Won won_of(Race r) { return r.bytes == 2 ? won_of_2(r) : r.bytes == 4 ? won_of_4(r) : won_of_8(r); }

/* An address of noise with one word more. */
static uint64_t with_word(uint64_t key, uint64_t word) { return mix((key + GOLDEN) ^ mix(word + GOLDEN)); }
