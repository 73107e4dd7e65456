"""Valid names of clusters, nodes and jobs."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?\Z")
"""The name of a cluster or a node."""
JOB_ID_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
JOB_ID = re.compile(rf"{JOB_ID_PATTERN}\Z", re.ASCII)
