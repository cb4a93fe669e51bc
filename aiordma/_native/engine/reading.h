/* Reads the arguments of a post into a work description, and makes the request. */
#ifndef AIORDMA_ENGINE_READING_H
#define AIORDMA_ENGINE_READING_H

#include "description.h"
#include "request.h"

int engine_work_names(void);
/* Read a RemoteMemory. 1: it was read; 0: it is something else; -1: an exception. */
int engine_read_remote(PyObject *remote, unsigned long long *address, unsigned long long *length,
                       unsigned long long *rkey);
/*
 * Read the arguments of a post. 1: they were read; 0: the port cannot handle them, and the general
 * path has to; -1: an exception. Call engine_release_work in every case.
 */
int engine_read(Port *port, enum engine_kind kind, PyObject *const *given,
                struct engine_work *work);
/* Make a request that holds its memory. Its slot is taken already. After an exception (NULL), the
   slot is given back. */
Request *engine_work_request(Port *port, struct engine_work *work);
/*
 * Whether the port and the regions are still usable. Called at a point after which no code of the
 * program's runs before the device has the request. Such code runs while the arguments are read
 * (__index__, buffers), and while the request is made (the garbage collector). It can close the
 * queue pair, or a region, which is not held yet.
 */
int engine_is_still_usable(const Port *port, const struct engine_work *work);
/* The request for the device, without its wr_id and its sges. */
struct ibv_send_wr engine_send_wr(const struct engine_work *work);

#endif
