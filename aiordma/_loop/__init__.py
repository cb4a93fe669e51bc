"""One interface to asyncio, uvloop and trio; the polling event loop; worker threads."""
