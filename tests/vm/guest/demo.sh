#!/bin/bash
# The two echo examples against each other; the status is the client's. For `make demo`, here on the
# software device and in the VM: demo.sh [address]

address=${1:-10.1.1.1}
log=$(mktemp)
python examples/echo_server.py --bind "$address" > >(tee "$log") 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; rm -f "$log"' EXIT
until grep -q '^listening on' "$log"; do
    kill -0 $server 2>/dev/null || { echo "the echo server ended before it listened" >&2; exit 1; }
    sleep 0.1
done
python examples/echo_client.py "$address"
status=$?
kill $server 2>/dev/null
wait $server
exit $status
