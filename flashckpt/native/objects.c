/* With very many tensors nearly all the time goes into waiting for memory: what the loops will need is fetched ahead. */
#include "objects.h"

#include <stdint.h>
#include <string.h>

#define AHEAD 8                        /* objects */
#define DICT_KEYS_AT 32                /* a hint where a dict has the address of its keys; a wrong one costs time alone */
#define BLOCK 64                       /* objects whose addresses are followed side by side */
enum answer { OTHER, SAME, CANNOT_SAY };

static inline const char *pointer_at(const char *at) {
    const char *found;
    memcpy(&found, at, sizeof found);
    return found;
}

static inline void fetch(const void *at) { __builtin_prefetch(at); }

static void fetch_dict(PyObject *dicts, Py_ssize_t count, Py_ssize_t k) {
    if (k + 2 * AHEAD < count) fetch(PyList_GetItem(dicts, k + 2 * AHEAD));
    if (k + AHEAD >= count) return;
    /* every dict is longer than what is read here: it has at least a size, keys and values behind its header */
    const char *keys = pointer_at((const char *)PyList_GetItem(dicts, k + AHEAD) + DICT_KEYS_AT);
    fetch(keys);
    fetch(keys + 64);
    fetch(keys + 128);
}

/* What `held` has from *at on, compared with the values of each dict, in order. */
static enum answer same_values(PyObject *dicts, PyTypeObject *other_kind, PyObject *held, Py_ssize_t *at) {
    const Py_ssize_t count = PyList_Size(dicts), room = PyList_Size(held);
    for (Py_ssize_t k = 0; k < count; k++) {
        fetch_dict(dicts, count, k);
        PyObject *dict = PyList_GetItem(dicts, k), *key, *value;
        if (!PyDict_CheckExact(dict) && !Py_IS_TYPE(dict, other_kind)) return CANNOT_SAY;
        for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value); ++*at)
            if (*at >= room || PyList_GetItem(held, *at) != value) return OTHER;
    }
    return SAME;
}

static enum answer same_elements(PyObject *lists, PyObject *held, Py_ssize_t *at) {
    const Py_ssize_t count = PyList_Size(lists), room = PyList_Size(held);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *list = PyList_GetItem(lists, k);
        if (!PyList_CheckExact(list)) return CANNOT_SAY;
        const Py_ssize_t size = PyList_Size(list);
        if (size > room - *at) return OTHER;
        for (Py_ssize_t n = 0; n < size; n++, ++*at)
            if (PyList_GetItem(held, *at) != PyList_GetItem(list, n)) return OTHER;
    }
    return SAME;
}

PyObject *same_members(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *dicts, *kind, *lists, *held;
    if (!PyArg_ParseTuple(args, "O!OO!O!", &PyList_Type, &dicts, &kind, &PyList_Type, &lists, &PyList_Type, &held))
        return NULL;
    if (!PyType_Check(kind)) {
        PyErr_SetString(PyExc_TypeError, "the second argument is a type");
        return NULL;
    }
    Py_ssize_t at = 0;
    enum answer answer = same_values(dicts, (PyTypeObject *)kind, held, &at);
    if (answer == SAME) answer = same_elements(lists, held, &at);
    if (answer == SAME && at != PyList_Size(held)) answer = OTHER;
    if (answer != CANNOT_SAY) return PyBool_FromLong(answer == SAME);
    Py_RETURN_NONE;
}

struct path {
    Py_ssize_t to_body, to_counter, to_value;
};

/* Follow each object to its counter; whether all have one. Pass by pass, so that the waits for memory overlap. */
static int read_block(const char *const *objects, size_t count, const struct path *path, uint32_t *out) {
    const char *bodies[BLOCK], *counters[BLOCK];
    for (size_t k = 0; k < count; k++) {
        bodies[k] = pointer_at(objects[k] + path->to_body);
        if (bodies[k] == NULL) return 0;
        fetch(bodies[k] + path->to_counter);
    }
    for (size_t k = 0; k < count; k++) {
        counters[k] = pointer_at(bodies[k] + path->to_counter);
        if (counters[k] == NULL) return 0;
        fetch(counters[k] + path->to_value);
    }
    for (size_t k = 0; k < count; k++) memcpy(&out[k], counters[k] + path->to_value, sizeof out[k]);
    return 1;
}

PyObject *read_counters(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *list;
    unsigned long long out_at;
    struct path path;
    if (!PyArg_ParseTuple(args, "O!nnnK", &PyList_Type, &list, &path.to_body, &path.to_counter, &path.to_value, &out_at))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    uint32_t *out = (uint32_t *)(uintptr_t)out_at;
    const char *objects[BLOCK];
    for (Py_ssize_t start = 0; start < count; start += BLOCK) {
        const Py_ssize_t size = count - start < BLOCK ? count - start : BLOCK;
        for (Py_ssize_t k = 0; k < size; k++) {
            objects[k] = (const char *)PyList_GetItem(list, start + k);
            if (start + k + BLOCK < count) fetch((const char *)PyList_GetItem(list, start + k + BLOCK) + path.to_body);
        }
        if (!read_block(objects, (size_t)size, &path, out + start)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
