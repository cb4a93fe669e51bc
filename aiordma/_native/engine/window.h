/* Memory windows of type 2. */
#ifndef AIORDMA_ENGINE_WINDOW_H
#define AIORDMA_ENGINE_WINDOW_H

#include "description.h"
#include "request.h"

extern PyTypeObject engine_window_type;

/* Read the arguments of a bind or a local invalidate. 0: take the general path. */
int engine_read_bind(const Port *port, struct engine_work *work, PyObject *const *given);
int engine_read_local_invalidate(const Port *port, struct engine_work *work,
                                 PyObject *const *given);
int engine_window_is_still_usable(const struct engine_work *work); /* of a work with a window */
void engine_fill_bind(const struct engine_work *work, struct ibv_send_wr *send);
/* The request of a work with a window is posted or collected: set the window's state. */
void engine_note_window(const struct engine_work *work, Request *request);

#endif
