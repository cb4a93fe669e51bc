# Two "hosts" for faults on the wire: a veth pair, an RDMA device on each end, all in one namespace
# (rxe of Linux 6.1 does not follow a network namespace). 10.2.2.1 is on veth1 and 10.2.2.2 on
# veth2, the devices are rxe1 and rxe2 (or siw1, siw2). Bind both sides to their addresses, and
# what they say to each other crosses the wire, where `tc qdisc add dev veth2 root netem ...` acts
# on it (the packets that leave 10.2.2.2). Sourced by devices.sh.

modprobe -a veth sch_netem
ip link add veth1 type veth peer name veth2

# The kernel delivers packets between two addresses of its own through lo, and takes a packet from
# one of them that comes in elsewhere for a forgery. So: what came over the wire is looked up as
# local, what goes from one end to the other is routed to the wire before local is looked at.
for end in 1 2; do
    echo 1 >/proc/sys/net/ipv4/conf/veth$end/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/veth$end/rp_filter
    ip rule add pref 1 iif veth$end lookup local
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip rule add pref 2 from 10.2.2.1 to 10.2.2.2 lookup 101
ip rule add pref 2 from 10.2.2.2 to 10.2.2.1 lookup 102
ip rule add pref 3 lookup local
ip rule del pref 0

for end in 1 2; do
    ip address add 10.2.2.$end/24 dev veth$end
    ip link set veth$end up
done
for end in 1 2; do
    other=$((3 - end))
    # No ARP: the first packet is not special, and a lossy wire loses only what a test sends.
    ip neighbour replace 10.2.2.$other dev veth$end nud permanent \
        lladdr "$(cat /sys/class/net/veth$other/address)"
    ip route add 10.2.2.$other dev veth$end table 10$end
done

for end in 1 2; do
    rdma link add $provider$end type $provider netdev veth$end
done
for end in 1 2; do
    settled $provider$end 10.2.2.$end
done
