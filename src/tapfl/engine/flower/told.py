"""What a server is told of a node's own faults: a few fixed words.

An error's text may name files of this machine, or quote data. It is for the node's operator, who
finds it in the node's log.
"""

from __future__ import annotations

import errno
import os

# What the system says of a disk; such words name no file.
_DISK = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES,
                                errno.EIO)))


def told(error: Exception) -> str:
    """Return what may leave the node of an error's text."""
    text = str(error)
    what = next((words for words in _DISK if words in text), "an error")
    return f"{what} on the node; its own log says more"
