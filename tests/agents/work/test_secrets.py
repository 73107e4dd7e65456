"""Secrets that workers of another user cannot read are named before anything runs."""

from __future__ import annotations

import os

import pytest

from agents.work.secrets import SecretsError, check_group_reads

OTHER = os.getegid() + 1


def test_secrets_must_be_readable_for_the_workers_group(tmp_path):
    path = tmp_path / "TOKEN"
    path.write_text("secret")
    found = {"TOKEN": path, "FROM_ENVIRONMENT": None}
    for mode, group, is_open in (
        (0o600, os.getegid(), False),
        (0o640, os.getegid(), True),
        (0o640, OTHER, False),
        (0o644, OTHER, True),
    ):
        path.chmod(mode)
        if is_open:
            check_group_reads(found, group)
            continue
        with pytest.raises(SecretsError, match=r"cannot read secrets: TOKEN .*; chgrp it"):
            check_group_reads(found, group)
