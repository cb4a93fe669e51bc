"""The backend of Dask's distributed. A folder of its own, as importing distributed takes the
virtual machine long: `make test-dask` runs it there."""
