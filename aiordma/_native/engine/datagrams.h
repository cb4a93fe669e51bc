/* Datagrams: their senders, and what arrives. */
#ifndef AIORDMA_ENGINE_DATAGRAMS_H
#define AIORDMA_ENGINE_DATAGRAMS_H

#include "request.h"

typedef struct DatagramReceive DatagramReceive;

extern PyTypeObject engine_senders_type, engine_datagram_type, engine_receive_type;

int engine_datagram_names(void);
PyObject *engine_grh_ends(PyObject *module, PyObject *grh);
/* Make a DatagramMessage of the first bytes of a block; NULL with an exception. */
PyObject *engine_datagram(PyObject *senders, const char *block, Py_ssize_t size,
                          const struct aiordma_completion *completion);
/* Make a receive, with a block for the header; NULL with an exception. */
DatagramReceive *engine_datagram_receive(Port *port, struct ibv_sge *header);
void engine_set_receive(Request *request, DatagramReceive *receive);

#endif
