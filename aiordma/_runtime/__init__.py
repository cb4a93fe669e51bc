"""What connections share: per event loop, the reactor and a hub for each device; per process, the
counters, the trace and each context's asynchronous events. And what finds devices and addresses.
"""
