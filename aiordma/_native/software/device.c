/*
 * The device's state: its lock, and its random numbers.
 */
#include "device.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

struct sw_device sw_device = {
    .ibv = {.node_type = IBV_NODE_RNIC,
            .transport_type = IBV_TRANSPORT_IWARP,
            .name = SW_NAME,
            .dev_name = SW_NAME},
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
};

void sw_lock(void)
{
    pthread_mutex_lock(&sw_device.lock);
}

void sw_unlock(void)
{
    pthread_mutex_unlock(&sw_device.lock);
}

void sw_wait(void)
{
    pthread_cond_wait(&sw_device.changed, &sw_device.lock);
}

void sw_random(void *bytes, size_t size)
{
    char *to = bytes;

    while (size) {
        ssize_t got = getrandom(to, size, 0);
        if (got < 0 && errno != EINTR)
            abort(); /* the alternative is keys that can be guessed */
        if (got > 0) {
            to += got;
            size -= (size_t)got;
        }
    }
}
