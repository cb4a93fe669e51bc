#!/bin/bash
# Takes RDMA away from this guest, lets `aiordma doctor --fix` bring it back, and checks what the
# doctor says before and after. The tests that follow run on the device that it made.

export PATH="$PWD/.venv/bin:$PATH"

fail() {
    echo "doctor: $1" >&2
    exit 1
}

rdma link delete rxe0 || fail "RDMA cannot be taken away"
with=""
if [ -e /proc/modules ]; then   # user-mode Linux has all built in
    modprobe -r rdma_ucm rdma_rxe || fail "the modules cannot be unloaded"
    with=modprobe
fi
said=$(aiordma doctor)
[ $? = 1 ] || fail "status 1 was expected without a device: $said"
[[ $said == *"$with"*"rdma link add rxe0"* ]] || fail "it names no command: $said"
said=$(aiordma doctor --fix 2>&1) || fail "--fix did not mend: $said"
aiordma doctor --json | python3 -c 'import json, sys; sys.exit(not json.load(sys.stdin)["works"])' ||
    fail "--json does not say that it works"
aiordma doctor 10.1.1.1 >/dev/null || fail "it does not work for 10.1.1.1"
rdma link show rxe0/1 | grep -q ACTIVE || fail "there is no rxe0: $(rdma link)"
echo "doctor --fix ${with:+loaded the modules and }made rxe0"
