/* A step's numbers, read and written where they lie: what a forward over a text's end and the nodes below it is told (`laid`, `chained`, as `kv.Rows` says), the tokens that it found
itself (`decided`), where the accepted ones' keys go (`moved`), who wins the race over the logits of one place (`won`), how far down a tree the winners are its nodes (`walked`), and
how far what was foreseen is what the model says (`guessed`). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "race.h"

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

typedef struct { Race race; const char *logits; unsigned long long seed, length, purpose; } Races; /* of places whose logits lie one after the other */

static int races_of(PyObject *given, Races *out)
{
    unsigned long long address;
    *out = (Races){.logits = NULL};
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "races are a tuple of what races.pyi says");
        return 0;
    }
    if (!PyArg_ParseTuple(given, "KilddKKK", &address, &out->race.bytes, &out->race.vocab, &out->race.warmth, &out->race.near, &out->seed, &out->length, &out->purpose))
        return 0;
    out->logits = (const char *)(uintptr_t)address;
    return 1;
}

/* Of the race over a line of logits, at a place so many tokens after the first. */
static Won won_there(Races *r, long line, Py_ssize_t after)
{
    r->race.raw = r->logits + line * r->race.vocab * r->race.bytes;
    r->race.key = with_word(with_word(with_word(0, r->seed), r->length + (uint64_t)after), r->purpose);
    return won_of(r->race);
}

/* Which line of all that are there is that of a place; -1: none. */
static long line_of(PyObject *at, Py_ssize_t index, long lines)
{
    long line = at == Py_None ? (long)index : index < PyList_GET_SIZE(at) ? PyLong_AsLong(PyList_GET_ITEM(at, index)) : -1;
    if (line >= 0 && line < lines)
        return line;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "no such place");
    return -1;
}

/* Takes over `item`, which may be none. */
static int put(PyObject *list, PyObject *item)
{
    int done = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

/* walked(races, places, at, parents, tokens): see races.pyi */
static PyObject *walked(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    Races r;
    Won out;
    PyObject *path;
    long places = count == 5 ? PyLong_AsLong(given[1]) : 0;
    Py_ssize_t index = 0, depth = 0; /* index: of a place, 0 of the text's end, n + 1 of node n */
    if (PyErr_Occurred())
        return NULL;
    if (count != 5 || !(given[2] == Py_None || PyList_Check(given[2])) || !PyList_Check(given[3]) || !PyList_Check(given[4])) {
        PyErr_SetString(PyExc_TypeError, "walked takes races, a number, a list or None, and two lists");
        return NULL;
    }
    count = PyList_GET_SIZE(given[3]);
    if (PyList_GET_SIZE(given[4]) != count) {
        PyErr_SetString(PyExc_IndexError, "nodes have a parent and a token each");
        return NULL;
    }
    if (!races_of(given[0], &r) || (path = PyList_New(0)) == NULL)
        return NULL;
    for (;;) {
        Py_ssize_t child = index;
        long line = line_of(given[2], index, places);
        if (line < 0)
            goto failed;
        out = won_there(&r, line, depth++);
        if (out.token < 0)
            break;
        while (child < count && (PyLong_AsLong(PyList_GET_ITEM(given[3], child)) != (index ? index - 1 : -1) || PyLong_AsLong(PyList_GET_ITEM(given[4], child)) != out.token))
            ++child;
        if (PyErr_Occurred())
            goto failed;
        if (child >= count)
            break;
        if (!put(path, PyLong_FromSsize_t(child)))
            goto failed;
        index = child + 1;
    }
    return Py_BuildValue("Nl", path, out.token);
failed:
    Py_DECREF(path);
    return NULL;
}

/* What is likeliest at a place, or wins the race there, into both lists. Returns the token; NONE where there is no number, FAILED. */
enum { NONE = -1, FAILED = -2 };
static long guess(const double *found, Races *r, long line, PyObject *tokens, PyObject *chances)
{
    Won best = r ? won_there(r, line, PyList_GET_SIZE(tokens)) : (Won){(long)found[3 * line], exp(found[3 * line + 1] - found[3 * line + 2])};
    if (r ? best.token < 0 : isnan(found[3 * line + 1]))
        return NONE;
    return put(tokens, PyLong_FromLong(best.token)) && put(chances, PyFloat_FromDouble(best.share)) ? best.token : FAILED;
}

/* Is one more wanted? -1: asking failed. */
static int wanted(PyObject *on, PyObject *chances, int known)
{
    PyObject *given[] = {Py_NewRef(PyList_GET_ITEM(chances, PyList_GET_SIZE(chances) - 1)), Py_True}, *told = PyObject_Vectorcall(on, given, known ? 2 : 1, NULL);
    int more = told ? PyObject_IsTrue(told) : -1;
    Py_XDECREF(told);
    Py_DECREF(given[0]);
    return more;
}

/* guessed(address, races, places, at, hints, tokens, chances, most, ends, on): see races.pyi */
static PyObject *guessed(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    enum { OVER, MORE, FORESEEN };
    const double *found = count == 10 ? PyLong_AsVoidPtr(given[0]) : NULL;
    long places = count == 10 ? PyLong_AsLong(given[2]) : 0, most = count == 10 ? PyLong_AsLong(given[7]) : 0;
    Races r;
    if (PyErr_Occurred())
        return NULL;
    if (count != 10 || !(given[3] == Py_None || PyList_Check(given[3])) || !PyList_Check(given[4]) || !PyList_Check(given[5]) || !PyList_Check(given[6]) || !PyAnySet_Check(given[8])) {
        PyErr_SetString(PyExc_TypeError, "guessed takes an address, races or None, a number, a list or None, three lists, a number, a set, and who is asked or None");
        return NULL;
    }
    if (given[1] != Py_None && !races_of(given[1], &r))
        return NULL;
    for (Py_ssize_t i = 0;; ++i) {
        long line = line_of(given[3], i, places), token;
        int known, more;
        if (line < 0 || (token = guess(found, given[1] == Py_None ? NULL : &r, line, given[5], given[6])) == FAILED)
            return NULL;
        if (token == NONE)
            return PyLong_FromLong(NONE);
        known = i < PyList_GET_SIZE(given[4]) && PyLong_AsLong(PyList_GET_ITEM(given[4], i)) == token;
        more = PyErr_Occurred() ? -1 : PySet_Contains(given[8], PyList_GET_ITEM(given[5], PyList_GET_SIZE(given[5]) - 1));
        more = more < 0 ? -1 : !more && PyList_GET_SIZE(given[5]) < most;
        if (more > 0 && given[9] != Py_None)
            more = wanted(given[9], given[6], known);
        if (more < 0)
            return NULL;
        if (!more || !known)
            return PyLong_FromLong(more ? MORE : known ? FORESEEN : OVER);
    }
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

/* laid(address, kinds, text, start, nodes, parents, count, skipped = 0): see races.pyi */
static PyObject *laid(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    int known = count == 7 || count == 8;
    int64_t *out = known ? PyLong_AsVoidPtr(given[0]) : NULL;
    long kinds = known ? PyLong_AsLong(given[1]) : 0, start = known ? PyLong_AsLong(given[3]) : 0, below = known ? PyLong_AsLong(given[6]) : 0;
    long skipped = count == 8 ? PyLong_AsLong(given[7]) : 0;
    uint64_t sees[64]; /* of each node, the slots on its path */
    long depth[64], end;
    if (PyErr_Occurred())
        return NULL;
    if (!known || !PyList_Check(given[2]) || !PyList_Check(given[4]) || !PyList_Check(given[5])) {
        PyErr_SetString(PyExc_TypeError, "laid takes an address, a number of kinds, a list and a number, two lists and a number");
        return NULL;
    }
    end = PyList_GET_SIZE(given[2]) - skipped;
    if (skipped < 0 || start < 0 || start > end || below < 0 || below > PyList_GET_SIZE(given[4]) || below > PyList_GET_SIZE(given[5]) || below > 64) {
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
        *out++ = PyLong_AsLongLong(n < 0 ? PyList_GET_ITEM(given[2], p + skipped) : PyList_GET_ITEM(given[4], n));
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
                                {"guessed", (PyCFunction)(void (*)(void))guessed, METH_FASTCALL, NULL},
                                {"won", (PyCFunction)(void (*)(void))won, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "races", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_races(void) { return PyModule_Create(&module); }
