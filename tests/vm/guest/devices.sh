# Brings up the RDMA devices that the settings ask for; a non-zero status means it could not.
# 10.1.1.1 and fd00::1 on dummy0 exist whatever the provider is.

set -e

fail() {
    echo "vm: $1" >&2
    exit 1
}

# settled DEVICE ADDRESS: wait until the device can be used with the address. For RoCE that is when
# the GID table holds it: a connection made earlier is rejected. iWARP has only the port's state.
settled() {
    ports=/sys/class/infiniband/$1/ports/1
    case $2 in
        fd00::1) gid=fd00:0000:0000:0000:0000:0000:0000:0001 ;;
        *) gid=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' $(echo "$2" | tr . ' ')) ;;
    esac
    tries=0
    until grep -q ACTIVE $ports/state &&
        { [ "$provider" != rxe ] || cat $ports/gids/* 2>/dev/null | grep -q "$gid"; }; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || fail "$1 did not become ready for $2 within 10 s"
        sleep 0.05
    done
}

modprobe dummy numdummies=0
ip link add dummy0 type dummy
ip address add 10.1.1.1/24 dev dummy0
ip -6 address add fd00::1/64 dev dummy0 nodad
ip link set dummy0 up   # before the RDMA device is added, or its GID table stays empty

case $provider in
    none) exit 0 ;;
    rxe)
        modprobe -a rdma_rxe rdma_ucm
        ;;
    siw)
        modprobe -a libcrc32c rdma_ucm iw_cm
        insmod "$siw_module"
        ;;
    *) fail "unknown provider $provider" ;;
esac
rdma link add ${provider}0 type $provider netdev dummy0
settled ${provider}0 10.1.1.1
settled ${provider}0 fd00::1

if [ "$veth" = 1 ]; then
    . "$guest/veth.sh"
fi
