/*
 * The device that libibverbs.so.1 contains, for both libraries, and its environment variables, which
 * `aiordma exec` has checked (docs/environment.md).
 */
#include "one_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "declarations/software.h"

enum { DEFAULT_CAPTURE_MIB = 1024 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct aiordma_provider *calls;

static uint64_t mebibytes(const char *text)
{
    return strtoull(text, NULL, 10) << 20;
}

/* Begin a capture; %p in the file's name is the number of the process. */
static void capture(void)
{
    const char *wanted = getenv("AIORDMA_CAPTURE"), *most = getenv("AIORDMA_CAPTURE_MIB");
    const char *number = strstr(wanted, "%p");
    char name[4096];

    snprintf(name, sizeof(name), "%s", wanted);
    if (number)
        snprintf(name, sizeof(name), "%.*s%d%s", (int)(number - wanted), wanted, (int)getpid(),
                 number + 2);
    int error = aiordma_software_capture(name, most ? mebibytes(most)
                                                    : (uint64_t)DEFAULT_CAPTURE_MIB << 20);
    if (error)
        fprintf(stderr, "aiordma: AIORDMA_CAPTURE='%s': %s cannot be written: %s\n", wanted, name,
                strerror(error));
}

static void begin(void)
{
    const char *held = getenv("AIORDMA_SOFTWARE_HELD_MIB"), *file = getenv("AIORDMA_CAPTURE");
    const char *device = getenv("AIORDMA_DEVICE");

    calls =
        device && !strcmp(device, "software_roce") ? aiordma_software_roce() : aiordma_software();
    if (held)
        aiordma_software_limit_held(mebibytes(held));
    if (!calls || !file || !file[0])
        return;
    capture();
    if (strstr(file, "%p") && pthread_atfork(NULL, NULL, capture)) {
        /* Out of memory: a child then has no capture. */
    }
}

EXPORTED const struct aiordma_provider *aiordma_exported_calls(void)
{
    if (pthread_once(&once, begin) || !calls)
        errno = ENOMEM;
    return calls;
}

EXPORTED void **aiordma_exported_slot(struct rdma_cm_id *id)
{
    return aiordma_software_slot(id);
}
