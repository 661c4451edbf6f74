"""The seams: the only modules that touch time, randomness, files and threads. Injected once, at the root.

clock.py      Clock: now, wall, sleep; RealClock, and VirtualClock for runs on a mock clock
rng.py        Rng: seed64, token, bytes; RealRng, and SeededRng for tests
disk.py       Disk and File: positioned reads, appends, explicit durability, locks; append_all, read_all, replace
real_disk.py  RealDisk: the machine's file system
device.py     Device: where model code runs, one call at a time; InlineDevice for tests
machine.py    Machine: how much memory there is and how much the process takes
pages.py      asks the C library for large memory pages, once, at the start of a program

Every other module of runtime/ and actors/ takes these as arguments; a test keeps it so. That is what lets the
simulation run the real actors under one seed, with time, disk and device of its own.
"""

from .clock import Clock, RealClock, VirtualClock
from .device import Device, InlineDevice
from .disk import Disk, File, FileStat, Readable, StrPath, append_all, read_all, replace
from .real_disk import RealDisk, RealFile
from .rng import RealRng, Rng, SeededRng

__all__ = [
    "Clock",
    "Device",
    "Disk",
    "File",
    "FileStat",
    "InlineDevice",
    "Readable",
    "RealClock",
    "RealDisk",
    "RealFile",
    "RealRng",
    "Rng",
    "SeededRng",
    "StrPath",
    "VirtualClock",
    "append_all",
    "read_all",
    "replace",
]
