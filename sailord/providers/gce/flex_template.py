"""Checks the template of a group whose requests wait: all that its instances have but the name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sailord.providers.gce.client import GceClient
from sailord.providers.gce.config import GceConfig, machine_shape
from sailord.providers.gce.network_preflight import Finding, or_none
from sailord.providers.gce.requests import CLUSTER_LABEL, startup_script
from sailord.providers.interface import Pool
from simulator.documents.problems import Problem

MODEL = "FLEX_START"


async def check_template(
    api: GceClient, config: GceConfig, pool: Pool, group: Any
) -> AsyncIterator[Finding]:
    """Check that sailord would see the instances of a group, and that their agents would start."""
    owner, _, name = group.instance_template.rpartition("/instanceTemplates/")
    is_regional = "/regions/" in owner
    where = {"region": owner.rpartition("/")[2]} if is_regional else {}
    client = "RegionInstanceTemplates" if is_regional else "InstanceTemplates"
    template = await or_none(api.call(client, "get", instance_template=name, **where))
    if template is None:
        what = f'the group "{group.name}" in {pool.zone} has no template "{name}"'
        yield Problem("provider.group", what, "give it one (docs/gce.md)"), True
        return
    made, machine = template.properties, machine_shape(pool.machine)[0]
    of_cluster = dict(made.labels).get(CLUSTER_LABEL, "")
    model, kind = made.scheduling.provisioning_model, made.machine_type.rpartition("/")[2]
    for what, is_right, option in (
        (
            f'has the label {CLUSTER_LABEL}="{of_cluster}": sailord would not see its instances',
            of_cluster == config.cluster_name,
            f"--labels={CLUSTER_LABEL}={config.cluster_name}",
        ),
        (
            f'has the provisioning model "{model}"',
            model == MODEL,
            f"--provisioning-model={MODEL}",
        ),
        (
            f'has the machine type "{kind}"',
            kind == machine,
            f"--machine-type={machine}",
        ),
    ):
        if not is_right:
            yield _problem(name, what, option), True
    scripts = [item.value for item in made.metadata.items if item.key == "startup-script"]
    option = f"--metadata-from-file of `sailord startup-script {pool.machine}`"
    if not scripts:
        yield _problem(name, "has no start-up script: no agent would start", option), True
    elif scripts[0].strip() != startup_script(pool, config).strip():
        yield _problem(name, "has another start-up script than this file makes", option), False


def _problem(template: str, what: str, option: str) -> Problem:
    cure = f"give the group a template with {option} (docs/gce.md)"
    return Problem("provider.group", f'its template "{template}" {what}', cure)
