"""What a user can do about a refusal of Google's: log in, enable an API, extend a role."""

from __future__ import annotations

import re

from sailord.providers.gce.client import LOGIN
from sailord.providers.gce.config import DEFAULT_ACCOUNT, GceConfig
from sailord.providers.gce.errors import GceError

ROLE = "sailor"
"""The custom role of docs/gce.md, which ``role.yaml`` beside this file makes."""
MACHINE_ROLE = "roles/iam.serviceAccountUser"
"""To make instances with a service account of their own."""
NOT_ENABLED = frozenset({"accessNotConfigured", "SERVICE_DISABLED"})


def cure_of(failure: GceError, config: GceConfig, service: str = "compute") -> str:
    """Return what the user can do about a refusal; empty: nothing, or the text says it."""
    project = config.project
    match failure.kind:
        case "permission" if failure.status == 401:
            return LOGIN
        case "permission" if failure.code in NOT_ENABLED:
            return f"gcloud services enable {service}.googleapis.com --project={project}"
        case "permission":
            return permission_cure(failure.text, config)
        case "quota":
            return "ask for more of it under IAM & Admin > Quotas"
        case _:
            return ""


def permission_cure(text: str, config: GceConfig) -> str:
    """Return how sailord's account gets the permission that a refusal names."""
    if "service account" in text.lower():
        cure = "let sailord's account use that of the instances: gcloud iam service-accounts"
        is_default = config.service_account == DEFAULT_ACCOUNT
        account = "ACCOUNT" if is_default else config.service_account
        binding = f"add-iam-policy-binding {account} --member=serviceAccount:NAME"
        return f"{cure} {binding} --role={MACHINE_ROLE}"
    member = f"--member=serviceAccount:NAME --role=projects/{config.project}/roles/{ROLE}"
    give = f"gcloud projects add-iam-policy-binding {config.project} {member}"
    lacks = re.search(r"'([a-z]+(?:\.[A-Za-z]+)+)'", text)
    if lacks is None:
        return f"give sailord's account the role of docs/gce.md: {give}"
    add = f"gcloud iam roles update {ROLE} --project={config.project} --add-permissions={lacks[1]}"
    return f"if sailord's account has the role of docs/gce.md: {add}; else: {give}"
