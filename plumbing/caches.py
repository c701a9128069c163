"""
plumbing/caches.py (tests/test_video.py): values in memory, and arrays in a folder for later runs
and other processes.

Used by video.py, whose FrameCache keeps decoded frames and tables of times in both. Reads and
writes that folder; each file in it holds its CRC-32, and is there whole or not at all.
"""
import contextlib
import io
import os
import threading
import zlib
from concurrent.futures import Future

import numpy as np


class MemoryCache:
    """Values by key, shared by threads; the least recently used are dropped.

    Threads that ask for the same key at the same time wait for the first of them. If that thread
    fails, all get the error. The error is not kept, because the file may be mended later.
    """

    def __init__(self, max_bytes):
        self.max_bytes = max_bytes
        self.bytes = 0  # kept now
        self.entries = {}  # key -> Future of (value, bytes), the least recently used first
        self.lock = threading.Lock()

    def get_or_compute(self, key, read):
        """Value of `key`: kept, or read by another thread, or read() -> (value, bytes)."""
        with self.lock:
            future = self.entries.pop(key, None)
            is_owner = future is None
            if is_owner:
                future = Future()
            self.entries[key] = future  # now the newest
        if not is_owner:  # outside the lock, which the reading thread needs
            return future.result()[0]  # or raises the error of the other thread
        try:
            value, size = read()  # outside the lock, because this may take seconds
        except BaseException as error:  # of every kind, or the waiting threads wait for ever
            with self.lock:
                del self.entries[key]  # a later call tries again
            future.set_exception(error)
            raise
        with self.lock:
            future.set_result((value, size))  # wakes the waiting threads
            self.bytes += size
            if self.bytes > self.max_bytes:
                self.make_room()
        return value

    def make_room(self):
        """Drops the least recently used values that no thread is still reading."""
        for key, future in list(self.entries.items()):
            if future.done() and self.bytes > self.max_bytes:
                self.bytes -= future.result()[1]
                del self.entries[key]


class DiskCache:
    """Arrays in a folder, a file for each name. Nothing is deleted: once the files take max_bytes,
    nothing more is written."""

    def __init__(self, folder, max_bytes):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.max_bytes = folder, max_bytes
        self.bytes = sum(entry.stat().st_size for entry in os.scandir(folder))

    def load(self, name):
        """-> [arrays], or None if there is no such file, or a damaged one."""
        try:
            with open(f"{self.folder}/{name}.frames", "rb") as file:
                checksum, data = file.read(4), file.read()
        except FileNotFoundError:
            return None
        # Starts at 1, so that no empty file passes.
        if checksum != zlib.crc32(data, 1).to_bytes(4, "big"):
            return None
        return list(np.load(io.BytesIO(data)).values())  # refuses pickles, which could run code

    def store(self, name, arrays):
        """Writes a whole file, or none if there is no room for it."""
        stream = io.BytesIO()
        np.savez(stream, *arrays)
        data = stream.getbuffer()
        if self.bytes + len(data) > self.max_bytes:
            return
        # No fsync: a file that a power cut has torn fails its checksum.
        part = f"{self.folder}/{name}.{os.getpid()}.{threading.get_ident()}"
        with open(part, "wb") as file:
            file.write(zlib.crc32(data, 1).to_bytes(4, "big"))
            file.write(data)
        os.replace(part, f"{self.folder}/{name}.frames")
        self.bytes += len(data)


def give_back_memory():
    """Gives freed memory back to the system. glibc keeps the memory of decoding in an arena per
    thread: hundreds of MiB after some hundred steps."""
    import ctypes

    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
