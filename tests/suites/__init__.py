"""Other projects' own tests, run on the streams' event loop and on asyncio's: `make suites`."""
