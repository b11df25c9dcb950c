/* Walks over Python objects that the interpreter would take hundreds of nanoseconds each for. */
#ifndef FLASHCKPT_OBJECTS_H
#define FLASHCKPT_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *same_members(PyObject *self, PyObject *args);
PyObject *read_counters(PyObject *self, PyObject *args);

#endif
