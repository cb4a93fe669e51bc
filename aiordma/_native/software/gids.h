/* The device's addresses. */
#ifndef AIORDMA_SOFTWARE_GIDS_H
#define AIORDMA_SOFTWARE_GIDS_H

#include <sys/socket.h>

#include "device.h"

/*
 * The GID table: an entry for each IP address of the interfaces that are up, of type
 * IBV_GID_TYPE_ROCE_V2; an address that goes leaves a hole, so that indices stay. Refreshed by
 * each call. Returns the index of an address (IPv4 as ::ffff:a.b.c.d), or -1 and errno: ENODEV, or
 * why the table could not be refreshed.
 */
int sw_gid_index(const union ibv_gid *gid);
/* 0, or ENODATA where the entry is empty, EINVAL beyond the table. */
int sw_gid_entry(int index, struct ibv_gid_entry *entry);
void sw_gid_of(const struct sockaddr *address, union ibv_gid *gid);
/* The other way round; the port is 0. */
void sw_address_of(const union ibv_gid *gid, struct sockaddr_storage *address);

/*
 * The kernel tells of addresses that come and go: GID_CHANGE, while a context is open. Fails only
 * for want of descriptors or memory: where the kernel does not tell, there are no such events.
 */
int sw_watch_gids(void);
void sw_unwatch_gids(void);
/* In a fork's child the engine has closed what was watched. */
void sw_gids_forked(void);

void sw_fill_gids(struct aiordma_provider *table);

#endif
