/*
 * Collectives by MPI as functions of the module (dist/collectives.h).
 */
#ifndef ONT_PY_DIST_H
#define ONT_PY_DIST_H

#include "py/dlpack.h"

PyObject *ont_mpi_open(PyObject *module, PyObject *unused);
PyObject *ont_mpi_all_reduce(PyObject *module, PyObject *tensor);
PyObject *ont_mpi_reduce_scatter(PyObject *module, PyObject *args);
PyObject *ont_mpi_all_gather(PyObject *module, PyObject *args);
PyObject *ont_mpi_broadcast(PyObject *module, PyObject *args);
PyObject *ont_mpi_barrier(PyObject *module, PyObject *unused);
PyObject *ont_mpi_leave(PyObject *module, PyObject *unused);

#endif
