# Sourced, with $provider set, by devices.sh and by tests that add a device.

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
