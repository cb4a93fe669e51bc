#!/bin/busybox sh
# The guest's first process, from the initramfs: builds the root out of the host's file system
# (read-only, below a tmpfs) and hands over to start.sh, which lives in that root. The host's folders
# come over 9p from QEMU. User-mode Linux reads them by path (hostfs); $bed_folder, from its command
# line, is the path of the control folder.

/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev

give_up() {
    echo "init: $1"
    poweroff -f
}

for module in $(cat /modules/order); do
    insmod "/modules/$module" || give_up "cannot load $module"
done

# mount_host TAG PATH OPTIONS WHERE: mount a folder of the host; the options are 9p's.
if [ -n "$bed_folder" ]; then
    mount_host() { mount -t hostfs -o "$2" none "$4"; }
else
    mount_host() {
        mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$4"
    }
fi
mount_host control "$bed_folder" cache=none /control || give_up "no control folder"
if [ -e /control/probe ]; then   # only asked whether this accelerator can run a kernel at all
    echo alive >/control/status
    poweroff -f
fi
# cache=loose: the host's files are taken as unchanging, which is what makes imports bearable.
mount_host host / ro,cache=loose /host || give_up "no file system of the host"
mount -t tmpfs -o size=75% none /writes
mkdir /writes/upper /writes/work
for link in bin sbin lib lib64; do   # followed all the time, and 9p asks the host each time
    [ -L /host/$link ] && ln -s "$(readlink /host/$link)" /writes/upper/$link
done
mount -t overlay -o lowerdir=/host,upperdir=/writes/upper,workdir=/writes/work none /new ||
    give_up "no overlay"
mount --bind /new /plain         # the same root, seen without the mounts that follow

for directory in tmp run dev/shm; do
    [ $directory = dev/shm ] && mount --move /dev /new/dev
    mkdir -p /new/$directory
    mount -t tmpfs -o mode=1777 none /new/$directory
done
mount --move /proc /new/proc
mount --move /sys /new/sys
mkdir -p /new/dev/pts /new/run/aiordma-vm
mount -t devpts none /new/dev/pts
# A project, a cache or an interpreter that lies in /tmp (or the like) must stay visible.
while IFS= read -r path; do
    mkdir -p "/new$path"
    mount --bind "/plain$path" "/new$path" || give_up "cannot show $path"
done </control/keep
results=$(cat /control/results)
mkdir -p "/new$results"
mount_host results "$results" cache=mmap "/new$results" || give_up "no results folder"
mount --move /control /new/run/aiordma-vm

exec switch_root /new /bin/sh /run/aiordma-vm/start
