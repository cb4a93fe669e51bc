"""CUDA's driver, libcuda, opened when it is first needed: it exports memory of a GPU as a dma-buf,
and copies between it and pinned memory of the CPU.

See: CUDA's driver API.
"""

import ctypes
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from threading import Lock
from typing import Any

from aiordma._native import ffi
from aiordma.verbs.foreign_memory import Described

__all__ = ("CudaError", "PinnedMemory", "export")

LIBRARY = "libcuda.so.1"
_EXPORT = "cuMemGetHandleForAddressRange"
_DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""
_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"""
_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE"""


class CudaError(Exception):
    """The driver is missing, too old, or refused a call; the message says which."""


class PinnedMemory:
    """Memory of the CPU from and to which the driver copies memory of a GPU. The copies may be made
    in any thread; what `close` finds under way is waited for, and what begins later does nothing.

    The driver orders a copy behind the work of the GPU's default stream only.

    Args:
        gpu: the memory of the GPU.
        length: bytes to pin.

    Raises:
        CudaError: the driver refused.
    """

    def __init__(self, gpu: Described, length: int) -> None:
        self.memory: mmap = mmap(-1, length)
        self._gpu = gpu  # its owner keeps the memory
        self._start = int(ffi.cast("uintptr_t", ffi.from_buffer(self.memory)))
        self._lock = Lock()
        self._is_open = True
        self._context = ctypes.c_void_p()
        ordinal, self._device = ctypes.c_int(), ctypes.c_int()
        _call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, self._there(0))
        _call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        # The context that torch, jax and CUDA's runtime use; it is there as long as they are.
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            pin = ("cuMemHostRegister_v2", self._here(0), ctypes.c_size_t(length), _PORTABLE)
            self._in_context(lambda: _call(*pin))
        except BaseException:
            _call("cuDevicePrimaryCtxRelease_v2", self._device)
            raise

    def copy_out(self, start: int, offset: int, length: int) -> None:
        """Copy bytes that begin at `start` in the GPU's memory to an offset of this memory.

        Raises:
            CudaError: the driver refused.
        """
        self._copy("cuMemcpyDtoH_v2", self._here(offset), self._there(start), length)

    def copy_in(self, start: int, offset: int, length: int) -> None:
        """Copy bytes at an offset of this memory to where `start` is in the GPU's memory.

        Raises:
            CudaError: the driver refused.
        """
        self._copy("cuMemcpyHtoD_v2", self._there(start), self._here(offset), length)

    def close(self) -> None:
        """Unpin the memory, which stays mapped as long as something refers to it. Idempotent.

        Raises:
            CudaError: the driver refused.
        """
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._in_context(lambda: _call("cuMemHostUnregister", self._here(0)))
                _call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _here(self, offset: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._start + offset)

    def _there(self, offset: int) -> ctypes.c_ulonglong:
        return _address(self._gpu.address + offset)

    def _copy(self, call: str, to: Any, of: Any, length: int) -> None:
        with self._lock:
            if self._is_open:
                self._in_context(lambda: _call(call, to, of, ctypes.c_size_t(length)))

    def _in_context(self, function: Callable[[], None]) -> None:
        """Call a function with the GPU's context current in this thread."""
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            function()
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def export(start: int, length: int) -> int:
    """Return the descriptor of a dma-buf of the pages of a GPU's memory that begin at `start`.

    Raises:
        CudaError: the driver cannot.
    """
    descriptor = ctypes.c_int(-1)
    pages = ctypes.c_size_t(-(-length // PAGESIZE) * PAGESIZE)
    place, no_flags = _address(start), ctypes.c_ulonglong(0)
    _call(_EXPORT, ctypes.byref(descriptor), place, pages, _DMA_BUF_FD, no_flags)
    return descriptor.value


def _address(value: int) -> ctypes.c_ulonglong:
    """Return an address of a GPU, a CUdeviceptr."""
    return ctypes.c_ulonglong(value)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        CudaError: it is missing, or failed.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(f"CUDA's driver cannot be opened ({error})") from None
    function = getattr(library, name, None)
    if function is None:
        raise CudaError(f"CUDA's driver has no {name}: install that of CUDA 11.7 or newer")
    failed = function(*arguments)
    if failed:
        text = ctypes.c_char_p()
        library.cuGetErrorName(failed, ctypes.byref(text))
        known = f"error {failed}" if text.value is None else text.value.decode(errors="replace")
        raise CudaError(f"CUDA's driver refused {name}: {known}")
