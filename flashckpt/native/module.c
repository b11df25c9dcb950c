/* The Python module flashckpt.native._copy: addresses in, findings out. Limited API: one build for every Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>

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

static PyObject *kind_count(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLong(KINDS);
}

/* What `run` and `join` are given: addresses, 0 for none. */
struct work {
    const struct level *level;
    const struct row *rows;
    Py_ssize_t count;
    struct digest_output out;
    int64_t *next;
};

static int parse_work(PyObject *args, struct work *work, int *check) {
    unsigned long long rows_at, first_at, digests_at, next_at, kinds_at, figures_at;
    Py_ssize_t level;
    long long digest_count;
    if (!PyArg_ParseTuple(args, "nKnKKLKKKp", &level, &rows_at, &work->count, &first_at, &digests_at, &digest_count,
                          &next_at, &kinds_at, &figures_at, check))
        return 0;
    if (level < 0 || (size_t)level >= level_count || work->count < 0) {
        PyErr_SetString(PyExc_ValueError, "no such level, or a negative number of rows");
        return 0;
    }
    work->level = levels[level];
    work->rows = (const struct row *)(uintptr_t)rows_at;
    work->out = (struct digest_output){(uint64_t *)(uintptr_t)digests_at, digest_count,
                                       (const int64_t *)(uintptr_t)first_at, (const uint8_t *)(uintptr_t)kinds_at,
                                       (struct figures *)(uintptr_t)figures_at};
    work->next = (int64_t *)(uintptr_t)next_at;
    return 1;
}

/* A thread that joins finds NOT_CHECKED until the rows are known to be good, then the next row, or `count` if they are not. */
#define NOT_CHECKED (-1)

static void open_rows(const struct work *work, enum problem problem) {
    if (work->next != NULL) __atomic_store_n(work->next, problem == FINE ? 0 : work->count, __ATOMIC_RELEASE);
}

static PyObject *run(PyObject *self, PyObject *args) {
    (void)self;
    struct work work;
    int check;
    if (!parse_work(args, &work, &check)) return NULL;
    struct finding finding;
    Py_BEGIN_ALLOW_THREADS
    finding = check_rows(work.rows, (size_t)work.count, &work.out);
    if (finding.problem == FINE && check) finding = check_memory(work.rows, (size_t)work.count);
    open_rows(&work, finding.problem);
    if (finding.problem == FINE) copy_rows(work.level, work.rows, (size_t)work.count, &work.out, work.next);
    Py_END_ALLOW_THREADS
    if (finding.problem == NO_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("iKK", (int)finding.problem, (unsigned long long)finding.row,
                         (unsigned long long)finding.other);
}

static PyObject *join(PyObject *self, PyObject *args) {
    (void)self;
    struct work work;
    int check;
    if (!parse_work(args, &work, &check)) return NULL;
    int64_t copied;
    Py_BEGIN_ALLOW_THREADS
    while (__atomic_load_n(work.next, __ATOMIC_ACQUIRE) == NOT_CHECKED) sched_yield();
    copied = copy_rows(work.level, work.rows, (size_t)work.count, &work.out, work.next);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(copied);
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
    {"kinds", kind_count, METH_NOARGS, "How many kinds of rows there are, those without numbers included."},
    {"run", run, METH_VARARGS,
     "run(level, rows, count, first, digests, digest_count, next, kinds, figures, check) -> (problem, row, other); addresses, 0 for none."},
    {"join", join, METH_VARARGS,
     "join(as run) -> bytes copied: takes rows of a run that is under way, or about to begin, in another thread."},
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
