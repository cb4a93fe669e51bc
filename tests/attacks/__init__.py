"""Attacks on a process that serves with aiordma: hostile peers made of plain sockets.

Three parties take part. The victim is a process of its own (`victim.py`), so that a crash or a hang
of it is a failed test and not the end of the run. Hostile peers are plain sockets (`peer.py`). A
good client (`good_client.py`) echoes messages through aiordma all the while; each test states that
it makes progress during the attack, or after it. The tests run natively on the software device.
"""
