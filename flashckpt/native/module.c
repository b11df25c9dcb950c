/* The Python module flashckpt.native._copy: addresses in, findings out. Limited API: one build for every Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "check.h"
#include "copy.h"
#include "guard.h"
#include "objects.h"

static const struct level *levels[MOST_LEVELS];
static size_t level_count;

static PyObject *level_names(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *names = PyTuple_New((Py_ssize_t)level_count);
    for (size_t k = 0; names != NULL && k < level_count; k++) {
        PyObject *name = PyUnicode_FromString(levels[k]->name);
        if (name == NULL || PyTuple_SetItem(names, (Py_ssize_t)k, name) != 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *run(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long rows_at, first_at, digests_at;
    Py_ssize_t count, level;
    long long digest_count;
    int check;
    if (!PyArg_ParseTuple(args, "nKnKKLp", &level, &rows_at, &count, &first_at, &digests_at, &digest_count, &check))
        return NULL;
    if (level < 0 || (size_t)level >= level_count || count < 0) {
        PyErr_SetString(PyExc_ValueError, "no such level, or a negative number of rows");
        return NULL;
    }
    const struct row *rows = (const struct row *)(uintptr_t)rows_at;
    const struct digest_output out = {(uint64_t *)(uintptr_t)digests_at, digest_count,
                                      (const int64_t *)(uintptr_t)first_at};
    struct finding finding;
    Py_BEGIN_ALLOW_THREADS
    finding = check_rows(rows, (size_t)count, &out);
    if (finding.problem == FINE && check) finding = check_memory(rows, (size_t)count);
    if (finding.problem == FINE) copy_rows(levels[level], rows, (size_t)count, &out);
    Py_END_ALLOW_THREADS
    if (finding.problem == NO_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("iKK", (int)finding.problem, (unsigned long long)finding.row,
                         (unsigned long long)finding.other);
}

/* The three of guard.h: calls are made with the GIL, one at a time. */
static PyObject *guard_range(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(args, "KK", &start, &nbytes)) return NULL;
    return PyLong_FromLong(guard((uintptr_t)start, (size_t)nbytes));
}

static PyObject *unguard_range(PyObject *self, PyObject *args) {
    (void)self;
    int number;
    if (!PyArg_ParseTuple(args, "i", &number)) return NULL;
    unguard(number);
    return Py_BuildValue("");
}

static PyObject *is_range_lost(PyObject *self, PyObject *args) {
    (void)self;
    int number;
    if (!PyArg_ParseTuple(args, "i", &number)) return NULL;
    return PyBool_FromLong(is_lost(number));
}

static PyMethodDef methods[] = {
    {"levels", level_names, METH_NOARGS, "Names of the levels this CPU has, the best one last."},
    {"run", run, METH_VARARGS,
     "run(level, rows, count, first, digests, digest_count, check) -> (problem, row, other); addresses, 0 for none."},
    {"guard", guard_range, METH_VARARGS, "guard(address, nbytes) -> number of the range, -1 where it cannot be guarded."},
    {"unguard", unguard_range, METH_VARARGS, "unguard(number): before the range is unmapped."},
    {"is_lost", is_range_lost, METH_VARARGS, "is_lost(number): whether pages of the range were replaced by zeros."},
    {"same_members", same_members, METH_VARARGS,
     "same_members(dicts, kind, lists, held) -> whether the dicts' values and the lists' elements are held's, one by one; "
     "None where a dict is neither a dict nor of that kind, or a list is of a subclass."},
    {"read_counters", read_counters, METH_VARARGS,
     "read_counters(objects, to_body, to_counter, to_value, out) -> whether all have a counter; out: address of uint32[n]."},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    (void)module;
    level_count = usable_levels(levels);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)(uintptr_t)prepare}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_copy", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__copy(void) { return PyModuleDef_Init(&definition); }
