/* The requests of one chain, until one call posts them. */
#ifndef AIORDMA_ENGINE_CHAIN_H
#define AIORDMA_ENGINE_CHAIN_H

#include "signatures.h"

typedef struct ChainPort ChainPort;

extern PyTypeObject engine_chain_type;

/* Collect a request. Returns as engine_post. */
PyObject *engine_collect(ChainPort *chain, enum engine_kind kind, PyObject *const *given);
PyObject *engine_end_chain(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

#endif
