"""Loaded by every Python process of the storm: sets its clock as a file says, while it runs.

``SAILOR_CHAOS_CLOCK`` names the file of one process: eight bytes, seconds by which ``time.time``
is ahead of the machine's clock. ``SAILOR_OTHER_VERSION`` makes the process write as the next or the
previous version would. Python imports this module by its name.
"""

import mmap
import os
import struct
import time

if path := os.environ.get("SAILOR_CHAOS_CLOCK"):
    with open(path, "rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    true_time = time.time
    time.time = lambda: true_time() + struct.unpack_from("d", ahead)[0]

if version := os.environ.get("SAILOR_OTHER_VERSION"):
    from tests.chaos import other_version

    other_version.install(int(version))
