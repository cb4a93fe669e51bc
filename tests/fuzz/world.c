/* The device, which is opened once, and the reader of inputs. */
#include "world.h"

#include <arpa/inet.h>

enum { MOST_ACTS = 64 };

struct world *the_world(void)
{
    static struct world world;

    if (world.table)
        return &world;
    world.table = aiordma_software();
    PROMISE(world.table);
    int count = 0;
    struct ibv_device **devices = world.table->get_device_list(&count);
    PROMISE(devices && count == 2);
    world.context = world.table->open_device(devices[0]);
    PROMISE(world.context);
    world.table->free_device_list(devices);
    return &world;
}

struct sockaddr_in loopback(uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

void promise_nothing_is_left(void)
{
    PROMISE(open_sockets() == 0);
    PROMISE(sw_device.counts.sockets == 0);
    PROMISE(sw_device.counts.identifiers == 0);
    PROMISE(sw_device.counts.queue_pairs == 0);
}

uint32_t take(struct input *input, int bytes)
{
    uint32_t value = 0;

    for (int i = 0; i < bytes; i++) {
        value <<= 8;
        if (input->left) {
            value |= *input->at++;
            input->left--;
        }
    }
    return value;
}

const uint8_t *take_bytes(struct input *input, size_t *size)
{
    const uint8_t *at = input->at;

    if (*size > input->left)
        *size = input->left;
    input->at += *size;
    input->left -= *size;
    return at;
}

int run_target(const struct target *target, const uint8_t *bytes, size_t size)
{
    static int is_set_up;
    struct input input = {bytes, size};

    if (!is_set_up)
        target->set_up();
    is_set_up = 1;
    target->begin(&input);
    for (int i = 0; i < MOST_ACTS && input.left; i++)
        target->act(&input);
    target->end(&input);
    return 0;
}
