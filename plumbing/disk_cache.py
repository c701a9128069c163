"""
plumbing/disk_cache.py (tests/test_video.py): arrays in a folder, for later runs and other
processes.

Each file holds its CRC-32, and is there whole or not at all. Reads and writes that folder. Used by
video.py, whose FrameCache keeps decoded frames and tables of times there.
"""
import contextlib
import io
import math
import os
import sys
import threading
import zlib

import numpy as np


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
