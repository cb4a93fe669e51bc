/* The device, opened once, and how an input is read. */
#include "world.h"

const struct aiordma_provider *aiordma_software(void);

struct world *the_world(void)
{
    static struct world world;

    if (world.table)
        return &world;
    world.table = aiordma_software();
    PROMISE(world.table);
    int count = 0;
    struct ibv_device **devices = world.table->get_device_list(&count);
    PROMISE(devices && count == 1);
    world.context = world.table->open_device(devices[0]);
    PROMISE(world.context);
    world.table->free_device_list(devices);
    return &world;
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
