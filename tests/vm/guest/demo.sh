#!/bin/bash
# The two echo examples against each other, in the VM; the status is the client's.

log=/run/aiordma-demo.log
: >$log
python examples/echo_server.py --bind 10.1.1.1 > >(tee $log) 2>&1 &
server=$!
until grep -q '^listening on' $log; do
    kill -0 $server 2>/dev/null || { echo "the echo server ended before it listened" >&2; exit 1; }
    sleep 0.1
done
python examples/echo_client.py 10.1.1.1
status=$?
kill $server 2>/dev/null
wait $server
exit $status
