#!/bin/sh
# Process 1 once the root is in place: sets up the RDMA device, runs the command, reports its exit
# status through the control folder, powers off. Reached as `. start.sh` from a one-line file there.

control=/run/aiordma-vm
. $control/settings   # bed, guest, modules, provider, veth, time_limit, project
export PATH="$path"

# Send a signal to every process of the command, also those that made sessions of their own.
end_everything() {
    for entry in /proc/[0-9]*; do
        { read -r line <"$entry/stat"; } 2>/dev/null || continue
        signal_of_session "$1" "${entry#/proc/}" ${line##*) }
    done
}

# signal_of_session SIGNAL PID STATE PARENT GROUP SESSION ...
signal_of_session() {
    [ "$6" = 0 ] || kill -"$1" "$2" 2>/dev/null
}

power_off() {
    exec >/dev/null 2>&1
    sync
    if [ "$bed" = uml ]; then exec busybox poweroff -f; fi   # it has no sysrq
    echo o >/proc/sysrq-trigger
    sleep 60
}

# Output goes through a virtio-serial port (a serial console is slow and eats bytes), and to it
# through a pipe: the port admits one opener, so `echo >/dev/stderr` would fail on it. User-mode
# Linux has a console that writes to a descriptor of the host.
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
exec </dev/null
if [ "$bed" = uml ]; then
    port=/dev/tty1
    stty -opost -F $port   # lines end as the command ends them
else
    until [ -c /dev/vport*p1 ]; do sleep 0.05; done
    port=$(echo /dev/vport*p1)   # the only one; its number depends on QEMU's other devices
fi
if [ "$bed" = uml ]; then   # perftest takes the clock's frequency from here
    { cat /proc/cpuinfo; cat $control/frequency; } >/run/cpuinfo
    mount --bind /run/cpuinfo /proc/cpuinfo
fi
mkfifo /run/aiordma-output
cat </run/aiordma-output >"$port" &
output=$!
exec >/run/aiordma-output 2>&1

if [ -n "$modules" ]; then
    mkdir -p "/lib/modules/$(uname -r)"
    mount --bind "$modules" "/lib/modules/$(uname -r)"
else   # all is built in, and the tests' shells are not this one
    for program in modprobe insmod; do ln -sf /bin/true /usr/local/sbin/$program; done
fi
hostname aiordma-vm
rm -f /etc/hosts /etc/resolv.conf   # a copy in the guest: there is no network to ask for names
printf '127.0.0.1 localhost aiordma-vm\n::1 localhost\n' >/etc/hosts
ip link set lo up
ulimit -l unlimited   # RDMA pins what it registers
ulimit -c 0
ulimit -H -n 524288   # systemd's usual hard limit; the kernel's own is 4,096
ulimit -S -n 1024

if ! ( . "$guest/devices.sh" ); then
    power_off   # without a status: the host reports that the VM failed
fi
: >$control/started

# The command gets a session of its own so that all of it can be told from the kernel's threads and
# from us (session 0). It runs in the foreground: a shell's background commands ignore SIGINT.
(
    sleep "$time_limit"
    : >$control/timed-out
    end_everything TERM
    sleep 5
    end_everything KILL
    sleep 2
    [ "$bed" = uml ] || echo w >/proc/sysrq-trigger   # not even SIGKILL helped: the blocked tasks, to the console
) >/dev/null 2>&1 &
(
    cd "$project" || exit 125
    exec setsid -w /bin/bash -c '. "$1"; exec bash "$2"' bash $control/environment $control/command
)
echo $? >$control/status

end_everything KILL   # a process left behind would hold the pipe open
exec >/dev/null 2>&1
( sleep 2; kill $output ) &
wait $output
power_off
