/* The base of WorkCompletion (verbs/completion.py). */
#ifndef AIORDMA_ENGINE_WORK_COMPLETION_H
#define AIORDMA_ENGINE_WORK_COMPLETION_H

#include "python_objects.h"

typedef struct {
    PyObject_HEAD struct aiordma_completion fields;
} Completion;

extern PyTypeObject engine_completion_type;

PyObject *engine_completion(const struct aiordma_completion *completion);
PyObject *engine_completion_tuple(const struct aiordma_completion *completion);
int engine_read_completion(PyObject *tuple, struct aiordma_completion *completion);
int engine_completion_names(void); /* after PyType_Ready */

#endif
