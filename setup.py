"""The compiled half of the build: cffi generates and compiles aiordma._native._binding."""

from setuptools import setup

setup(cffi_modules=["aiordma/_native/build.py:ffibuilder"])
