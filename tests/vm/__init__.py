"""The test bed: a command run under Debian's stock kernel in QEMU, with a real RDMA device.

With BED=uml the kernel is a user-mode one, built from Debian's sources: nothing is emulated.

The host's own kernel needs no RDMA and nothing is installed but apt packages. The kernel package is
unpacked into a cache, never installed; the guest's root is the host's file system, read-only over
9p below a tmpfs, so the same venv and the same rdma-core are used on both sides and no disk image
is ever built. Files, bottom to top:

    report.py      the one exception and the one way to print
    cache.py       what is made once: locks and atomic renames
    packages.py    apt: what is installed, what is missing, what can be downloaded
    kernel.py      Debian's kernel, unpacked
    initramfs.py   busybox and the handful of modules that reach the host's file system
    siw.py         the siw module, built out of tree: Debian ships none
    qemu.py        KVM or emulation, and QEMU's command line
    uml.py         a user-mode kernel, built from Debian's sources, and its command line
    machine.py     one run: control folder, output, time limit, exit status
    parts.py       the parts of `make test`, at the same time
    summary.py     the table at the end of `make test`
    __main__.py    the command line: python3 -m tests.vm --help
    guest/         what runs inside, as shell files

Standard library only: it runs before the venv exists.
"""
