/* The device's addresses. */
#ifndef AIORDMA_SOFTWARE_GIDS_H
#define AIORDMA_SOFTWARE_GIDS_H

#include <sys/socket.h>

#include "device.h"

/*
 * The GID table has an entry of type IBV_GID_TYPE_ROCE_V2 for each IP address of the interfaces
 * that are up. A removed address leaves an empty entry, so that the other indices stay. The table is
 * compared with the interfaces' addresses when the kernel notifies of a change. Only if it cannot
 * notify, the calls below compare it each time, which takes long on a machine with many addresses.
 * sw_gid_index returns the index of an address (IPv4 as ::ffff:a.b.c.d), or -1 and errno: ENODEV, or
 * the reason why the addresses could not be read. Another local address, of a local route or of
 * 127.0.0.0/8, gets an entry here, which stays; ENOSPC: they have half of the table.
 */
int sw_gid_index(const union ibv_gid *gid);
/* Whether an address is this machine's, in the table or not. If not, errno is as of sw_gid_index. */
int sw_is_local(const union ibv_gid *gid);
/* Whether the table has an address; for each packet. Never compares the table if it has. */
int sw_has_gid(const union ibv_gid *gid);
/* Read an entry. Returns 0, ENODATA if the entry is empty, or EINVAL beyond the table. */
int sw_gid_entry(int index, struct ibv_gid_entry *entry);
void sw_gid_of(const struct sockaddr *address, union ibv_gid *gid);
/* The inverse of sw_gid_of. The port is 0. */
void sw_address_of(const union ibv_gid *gid, struct sockaddr_storage *address);

/*
 * Watch the kernel's notifications of addresses from now on, and raise GID_CHANGE. Fails only for
 * lack of descriptors or memory. If the kernel does not allow it, there are no such events.
 */
int sw_watch_gids(void);
/* In a fork's child: the engine has closed what was watched. */
void sw_gids_forked(void);
extern const struct sw_state sw_gids_state;

void sw_fill_gids(struct aiordma_provider *table);

#endif
