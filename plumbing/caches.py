"""
plumbing/caches.py (tests/test_video.py): values in memory, and arrays in a folder for later runs
and other processes.

Each file holds its CRC-32, and is there whole or not at all. Reads and writes that folder. Used by
video.py, whose FrameCache keeps decoded frames and tables of times in both.
"""
import contextlib
import io
import math
import mmap
import os
import sys
import threading
import zlib
from concurrent.futures import Future

import numpy as np


class MemoryCache:
    """Values by key, shared by threads; the least recently used are dropped.

    Threads that ask for the same key at the same time wait for the first of them. If that thread
    fails, all get the error. The error is not kept, because the file may be mended later.
    max_bytes: a larger value is returned and not kept.
    """

    def __init__(self, max_bytes):
        self.max_bytes, self.bytes, self.lock = max_bytes, 0, threading.Lock()  # bytes kept now
        self.entries = {}  # key -> Future of (value, bytes), oldest first

    def get_or_compute(self, key, read, last=True):
        """Value of `key`: kept, or read by another thread, or read() -> (value, bytes). last: the
        value itself may be dropped at once, if it is larger than all."""
        with self.lock:
            is_owner = key not in self.entries
            future = self.entries[key] = self.entries.pop(key, None) or Future()  # now the newest
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
            # Usually the first entry, so no list of all entries is made.
            while self.bytes > self.max_bytes and (oldest := next(
                    (name for name, entry in self.entries.items()
                     if entry.done() and (last or name != key)), None)) is not None:
                self.bytes -= self.entries.pop(oldest).result()[1]
        return value


class DiskCache:
    """Tables and frames on disk, for later runs and other processes; the least recently used are
    deleted. max_bytes: bytes of all files; beyond 8 processes each may add 1/64."""

    def __init__(self, path, max_bytes):
        self.path, self.max_bytes = path, max_bytes
        self.writing = threading.Lock()  # one thread at a time
        self.unseen = math.inf  # bytes written since the last look through the folder

    def load(self, name):
        """-> [arrays and numbers], None if missing or damaged."""
        path = os.path.join(self.path, name + ".frames")
        with contextlib.suppress(OSError):  # no such file, or another user's
            os.utime(path)  # marks the file as used now
        with contextlib.suppress(OSError):  # another process may have made room
            with open(path, "rb") as file:
                check, data = file.read(4), file.read()
            if check == zlib.crc32(data, 1).to_bytes(4, "big"):  # 1, so that no empty file passes
                arrays = np.load(io.BytesIO(data)).values()  # refuses pickles, which could run code
                return [array if array.ndim else array.item() for array in arrays]
            os.unlink(path)

    def store(self, name, values):
        """Writes a whole file or none. After an error, reading goes on without the folder."""
        stream = io.BytesIO()
        np.savez(stream, *values)
        data = zlib.crc32(stream.getbuffer(), 1).to_bytes(4, "big") + stream.getbuffer()
        part = os.path.join(self.path, os.urandom(16).hex() + ".frames")  # not a name to look up
        limit = self.max_bytes * 7 // 8  # the rest is for files that others write meanwhile
        with self.writing:
            if len(data) > limit:
                return
            try:
                os.makedirs(self.path, exist_ok=True)
                self.unseen += len(data)
                if self.unseen > self.max_bytes / 64:  # thousands of files take 0.1 s
                    self.make_room(limit - len(data))
                    self.unseen = 0
                with open(part, "xb") as file:
                    file.write(data)
                with contextlib.suppress(FileNotFoundError):  # another process needed the room
                    os.replace(part, os.path.join(self.path, name + ".frames"))
            except OSError as error:
                print(f"frames are no longer kept on disk: {error}", file=sys.stderr, flush=True)
                self.max_bytes = 0  # reading goes on
                with contextlib.suppress(OSError):
                    os.unlink(part)

    def make_room(self, limit):
        """Deletes the least recently used files until `limit` bytes are left."""
        files = []  # (mtime in ns, bytes, path)
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                if entry.name.endswith(".frames") and len(entry.name) == 39:  # else: not of a cache
                    files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        excess = sum(size for _, size, _ in files) - limit
        for _, size, path in sorted(files):
            if excess > 0:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # a reader keeps an open file
                excess -= size


def lacks_memory(limit):
    """Whether the system refuses this process memory, a GiB or half of what is left below `limit`
    bytes, its own bound (strict overcommit, ulimit -v)."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * mmap.PAGESIZE
        mmap.mmap(-1, max(1, min(2**30, (limit - used) // 2)), mmap.MAP_PRIVATE).close()
    except (OSError, MemoryError) as error:
        return not isinstance(error, FileNotFoundError)  # macOS has no /proc, and no such bound
    return False


def give_back_memory():
    """Gives freed memory back to the system. glibc keeps the memory of decoding in an arena per
    thread: hundreds of MiB after some hundred steps."""
    import ctypes

    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
