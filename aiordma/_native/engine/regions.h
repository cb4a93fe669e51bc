/* The fields of registered memory that posts read. */
#ifndef AIORDMA_ENGINE_REGIONS_H
#define AIORDMA_ENGINE_REGIONS_H

#include "python_objects.h"

/* The base of MemoryRegion: the fields that a post reads. */
typedef struct {
    PyObject_HEAD PyObject *domain;
    unsigned long long start;   /* the address of its first byte in this process; 0: a dma-buf */
    unsigned long long address; /* the same in work requests: `start`, or the iova */
    Py_ssize_t length;
    unsigned int lkey;
    struct ibv_mr *mr; /* for binding windows */
    unsigned int access;
    Py_ssize_t users; /* posted requests and windows that hold it */
    char retired;     /* its last user closes it */
    char usable;      /* it is registered */
    char writable;    /* the device may write to it */
} RegionBase;

/* The base of MemorySlice. */
typedef struct {
    PyObject_HEAD RegionBase *region;
    unsigned long long address;
    Py_ssize_t length;
    unsigned int lkey;
} Part;

extern PyTypeObject engine_region_type, engine_part_type;

int engine_close_region(RegionBase *region); /* -1: an exception */

/* Count one user less. The last one closes a retired region; -1 with an exception if that fails. */
static inline int engine_release_region(RegionBase *region)
{
    region->users--;
    return region->retired && !region->users ? engine_close_region(region) : 0;
}

#endif
