# Brings up the RDMA devices that the settings ask for; a non-zero status means it could not.
# 10.1.1.1 and fd00::1 on dummy0 exist whatever the provider is.

set -e

. "$guest/settled.sh"

modprobe dummy numdummies=0
ip link add dummy0 type dummy
ip address add 10.1.1.1/24 dev dummy0
ip -6 address add fd00::1/64 dev dummy0 nodad
ip link set dummy0 up   # before the RDMA device is added, or its GID table stays empty

case $provider in
    none) exit 0 ;;
    rxe)
        modprobe -a rdma_rxe rdma_ucm
        # RoCE's packets of 4,096 bytes: large messages need a quarter of the packets, of which each
        # is a lot of work in an emulated machine. The addresses stay.
        ip link set dummy0 mtu 4200
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
