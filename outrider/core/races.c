/* A step's numbers, read and written where they lie: what a forward over a text's end and the nodes below it is told (`laid`, `chained`, as `kv.Rows` says), the tokens that it found
itself (`decided`), where the accepted ones' keys go (`moved`), who wins the race over the logits of one place (`won`), and how far down a tree the winners are its nodes (`walked`): what `sampling.line` and `noise.RowNoise.won` do, in one pass and without arrays.

Of races the same law, operation by operation: logits less the largest, over the temperature, in float32; 52 bits of noise for each id, by SplitMix64's
finaliser; the noise is -log(-log(1 - w)). Exact numbers only for ids whose bound comes near the first. Settings that look at a text or leave ids
out are Python's. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
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

/* won(address, size, vocab, warmth, near, *words): see races.pyi */
static PyObject *won(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    Race r = {.key = 0};
    Won out;
    if (count < 5) {
        PyErr_SetString(PyExc_TypeError, "won takes five arguments, and the words of an address");
        return NULL;
    }
    r.raw = PyLong_AsVoidPtr(given[0]);
    r.bytes = (int)PyLong_AsLong(given[1]);
    r.vocab = PyLong_AsLong(given[2]);
    r.warmth = PyFloat_AsDouble(given[3]);
    r.near = PyFloat_AsDouble(given[4]);
    for (Py_ssize_t i = 5; i < count; ++i)
        r.key = with_word(r.key, PyLong_AsUnsignedLongLongMask(given[i]));
    if (PyErr_Occurred())
        return NULL;
    out = won_of(r);
    return Py_BuildValue("ld", out.token, out.share);
}

/* walked(address, size, vocab, warmth, near, places, at, parents, tokens, seed, length, purpose): see races.pyi */
static PyObject *walked(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    Race r = {.key = 0};
    Won out;
    const char *first = count == 12 ? PyLong_AsVoidPtr(given[0]) : NULL;
    PyObject *path, *node;
    long places, index = 0;
    uint64_t seed, length, purpose;
    if (count != 12 || !(given[6] == Py_None || PyList_Check(given[6])) || !PyList_Check(given[7]) || !PyList_Check(given[8])) {
        PyErr_SetString(PyExc_TypeError, "walked takes an address, three sizes and two numbers, a list or None, two lists, and three words");
        return NULL;
    }
    r.bytes = (int)PyLong_AsLong(given[1]);
    r.vocab = PyLong_AsLong(given[2]);
    r.warmth = PyFloat_AsDouble(given[3]);
    r.near = PyFloat_AsDouble(given[4]);
    places = PyLong_AsLong(given[5]);
    seed = PyLong_AsUnsignedLongLongMask(given[9]);
    length = PyLong_AsUnsignedLongLongMask(given[10]);
    purpose = PyLong_AsUnsignedLongLongMask(given[11]);
    count = PyList_GET_SIZE(given[7]);
    if (PyErr_Occurred() || PyList_GET_SIZE(given[8]) != count || (path = PyList_New(0)) == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "nodes have a parent and a token each");
        return NULL;
    }
    for (;;) { /* index: of a place, 0 of the text's end, n + 1 of node n */
        long line = given[6] == Py_None ? index : index < PyList_GET_SIZE(given[6]) ? PyLong_AsLong(PyList_GET_ITEM(given[6], index)) : -1, child = index;
        if (line < 0 || line >= places) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "no such place");
            goto failed;
        }
        r.raw = first + line * r.vocab * r.bytes;
        r.key = with_word(with_word(with_word(0, seed), ++length), purpose);
        out = won_of(r);
        if (out.token < 0)
            break;
        while (child < count && (PyLong_AsLong(PyList_GET_ITEM(given[7], child)) != (index ? index - 1 : -1) || PyLong_AsLong(PyList_GET_ITEM(given[8], child)) != out.token))
            ++child;
        if (PyErr_Occurred())
            goto failed;
        if (child >= count)
            break;
        node = PyLong_FromLong(child);
        if (node == NULL || PyList_Append(path, node) < 0) {
            Py_XDECREF(node);
            goto failed;
        }
        Py_DECREF(node);
        index = child + 1;
    }
    return Py_BuildValue("Nl", path, out.token);
failed:
    Py_DECREF(path);
    return NULL;
}

/* decided(address, places, at): see races.pyi */
static PyObject *decided(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    const double *found = count == 3 ? PyLong_AsVoidPtr(given[0]) : NULL;
    long places = count == 3 ? PyLong_AsLong(given[1]) : 0;
    PyObject *tokens, *chances, *out = NULL;
    int all = count == 3 && given[2] == Py_None;
    if (PyErr_Occurred())
        return NULL;
    if (count != 3 || !(all || PyList_Check(given[2]))) {
        PyErr_SetString(PyExc_TypeError, "decided takes an address, a number of places, and a list or None");
        return NULL;
    }
    count = all ? places : PyList_GET_SIZE(given[2]);
    tokens = PyList_New(count);
    chances = PyList_New(count);
    for (Py_ssize_t i = 0; tokens && chances && i < count; ++i) {
        long at = all ? (long)i : PyLong_AsLong(PyList_GET_ITEM(given[2], i));
        PyObject *token, *chance;
        if (at < 0 || at >= places) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "no such place");
            goto done;
        }
        if (isnan(found[3 * at + 1])) {
            out = Py_NewRef(Py_None);
            goto done;
        }
        token = PyLong_FromDouble(found[3 * at]);
        chance = PyFloat_FromDouble(found[3 * at + 1] - found[3 * at + 2]);
        if (!token || !chance) {
            Py_XDECREF(token);
            Py_XDECREF(chance);
            goto done;
        }
        PyList_SET_ITEM(tokens, i, token);
        PyList_SET_ITEM(chances, i, chance);
    }
    if (tokens && chances)
        out = PyTuple_Pack(2, tokens, chances);
done:
    Py_XDECREF(tokens);
    Py_XDECREF(chances);
    return out;
}

/* laid(address, kinds, text, start, nodes, parents, count): see races.pyi */
static PyObject *laid(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    int64_t *out = count == 7 ? PyLong_AsVoidPtr(given[0]) : NULL;
    long kinds = count == 7 ? PyLong_AsLong(given[1]) : 0, start = count == 7 ? PyLong_AsLong(given[3]) : 0, below = count == 7 ? PyLong_AsLong(given[6]) : 0;
    uint64_t sees[64]; /* of each node, the slots on its path */
    long depth[64], end;
    if (PyErr_Occurred())
        return NULL;
    if (count != 7 || !PyList_Check(given[2]) || !PyList_Check(given[4]) || !PyList_Check(given[5])) {
        PyErr_SetString(PyExc_TypeError, "laid takes an address, a number of kinds, a list and a number, two lists and a number");
        return NULL;
    }
    end = PyList_GET_SIZE(given[2]);
    if (start < 0 || start > end || below < 0 || below > PyList_GET_SIZE(given[4]) || below > PyList_GET_SIZE(given[5]) || below > 64) {
        PyErr_SetString(PyExc_IndexError, "no such tokens");
        return NULL;
    }
    for (long n = 0; n < below; ++n) {
        long parent = PyLong_AsLong(PyList_GET_ITEM(given[5], n));
        if (parent >= n)
            PyErr_SetString(PyExc_IndexError, "a node comes after its parent");
        if (parent >= n || PyErr_Occurred())
            return NULL;
        sees[n] = (parent < 0 ? 0 : sees[parent]) | (uint64_t)1 << n;
        depth[n] = parent < 0 ? 1 : depth[parent] + 1;
    }
    for (long p = start; p < end + below; ++p) {
        long n = p - end; /* a node, from 0 on */
        *out++ = PyLong_AsLongLong(n < 0 ? PyList_GET_ITEM(given[2], p) : PyList_GET_ITEM(given[4], n));
        *out++ = n < 0 ? p : end - 1 + depth[n];
        *out++ = p;
        *out++ = n < 0 ? p + 1 : end;
        for (long kind = 0; kind < kinds; ++kind)
            *out++ = n < 0 ? 0 : (int64_t)sees[n];
    }
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* chained(address, kinds, tokens, position, slot, upto, sees): see races.pyi */
static PyObject *chained(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    int64_t *out = count == 7 ? PyLong_AsVoidPtr(given[0]) : NULL;
    long part[5] = {0}; /* kinds, none, position, slot, upto */
    uint64_t sees = count == 7 ? PyLong_AsUnsignedLongLongMask(given[6]) : 0;
    if (count != 7 || !PyList_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "chained takes an address, a number of kinds, a list and four numbers");
        return NULL;
    }
    for (int i = 0; i < 5; ++i)
        part[i] = i == 1 ? 0 : PyLong_AsLong(given[1 + i]);
    count = PyList_GET_SIZE(given[2]);
    if (!PyErr_Occurred() && (part[4] < 0 || part[3] < part[4] || part[3] - part[4] + count > 64))
        PyErr_SetString(PyExc_IndexError, "nodes lie in 64 slots behind a text");
    if (PyErr_Occurred())
        return NULL;
    for (Py_ssize_t i = 0; i < count; ++i) {
        sees |= (uint64_t)1 << (part[3] - part[4] + i);
        *out++ = PyLong_AsLongLong(PyList_GET_ITEM(given[2], i));
        *out++ = part[2] + i;
        *out++ = part[3] + i;
        *out++ = part[4];
        for (long kind = 0; kind < part[0]; ++kind)
            *out++ = (int64_t)sees;
    }
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* moved(address, times, stride, heads, each, bytes, sources, start): see races.pyi */
static PyObject *moved(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    char *at = count == 8 ? PyLong_AsVoidPtr(given[0]) : NULL;
    Py_ssize_t part[5]; /* a block may be larger than a long counts */
    long sources[64], safe = 1, start = count == 8 ? PyLong_AsLong(given[7]) : 0;
    if (count != 8 || !PyList_Check(given[6])) {
        PyErr_SetString(PyExc_TypeError, "moved takes an address, five numbers, a list and a number");
        return NULL;
    }
    for (int i = 0; i < 5; ++i)
        part[i] = PyLong_AsSsize_t(given[1 + i]);
    count = PyList_GET_SIZE(given[6]);
    for (Py_ssize_t i = 0; i < count && i < 64; ++i) {
        sources[i] = PyLong_AsLong(PyList_GET_ITEM(given[6], i));
        if (sources[i] < start + i || (i && sources[i] <= sources[i - 1]))
            safe = 0; /* it would be written before it is read */
    }
    if (!PyErr_Occurred() && (start < 0 || count > 64 || !safe))
        PyErr_SetString(PyExc_ValueError, "slots are moved down, at most 64 of them, each behind the one before");
    if (PyErr_Occurred())
        return NULL;
    for (long time = 0; time < part[0]; ++time)
        for (long head = 0; head < part[2]; ++head) {
            char *slots = at + time * part[1] + head * part[3];
            for (Py_ssize_t i = 0; i < count; ++i)
                memmove(slots + (start + i) * part[4], slots + sources[i] * part[4], part[4]);
        }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"moved", (PyCFunction)(void (*)(void))moved, METH_FASTCALL, NULL},
                                {"chained", (PyCFunction)(void (*)(void))chained, METH_FASTCALL, NULL},
                                {"laid", (PyCFunction)(void (*)(void))laid, METH_FASTCALL, NULL},
                                {"decided", (PyCFunction)(void (*)(void))decided, METH_FASTCALL, NULL},
                                {"walked", (PyCFunction)(void (*)(void))walked, METH_FASTCALL, NULL},
                                {"won", (PyCFunction)(void (*)(void))won, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "races", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_races(void) { return PyModule_Create(&module); }
