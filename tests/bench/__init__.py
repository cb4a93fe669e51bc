"""`make bench`: the goals of docs/benchmarks.md, each measured beside its reference.

rows.py         what a row is, and what becomes of it
rounds.py       reference, candidate, reference, candidate, ...
candidates.py   aiordma, by the runner that `aiordma bench` is
perftest.py     references in C: the programs of perftest
same_work.py    the same work in C, on any device (same_work.c)
instant.py      a device that takes no time (instant.c), for what Python costs
native.py       rows of this machine: the software device
beside_c.py     rows of this machine: the software device from Python and from C
beside_tcp.py   rows of this machine: large transfers beside plain TCP in C (plain_tcp.c), and what
                connections cost each other (streaming.py)
rxe.py          rows of the virtual machine: latency, throughput
connects.py     what a connection costs: connect, one echo, close
connections.py  rows of the virtual machine: a thousand connections
simulated.py    rows of simulated hosts, with many endpoints and with few
valkey_gets.py  rows of a Valkey server's clients, over RDMA and over TCP
peers.py        rows of the virtual machine: other Python libraries
report.py       the table, the progress bar, build/bench.json
__main__.py     which part runs where: python3 -m tests.bench --help
"""
