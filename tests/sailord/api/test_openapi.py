"""What the OpenAPI document says is what sailord does: no address answers anything else."""

from __future__ import annotations

import json
import os
import re
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from sailord.api.routes import ROUTES
from tests.processes import wait_until
from tests.sailord.daemon.running import JOB, TOKEN

with warnings.catch_warnings():
    # Some of its dependencies use what newer versions of others call outdated.
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

pytestmark = pytest.mark.chaos
EXAMPLES = max(4, int(os.environ.get("SAILOR_EXAMPLES", "0")) // 4)


@pytest.fixture(scope="module")
def trained(head):
    """A job that runs, so that there is something to ask about."""
    assert head.ask("POST", "/v1/jobs", {"job": JOB, "id": "doc"})[0] == 201
    wait_until(lambda: "running" in str(head.ask("GET", "/v1/jobs/doc")[1].get("phase")))
    yield head
    head.ask("POST", "/v1/jobs/doc/cancel", {})


@pytest.fixture(scope="module")
def api(trained):
    return schemathesis.openapi.from_dict(trained.ask("GET", "/openapi.json")[1])


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(route, marks=pytest.mark.slow if route.name == "live" else [], id=route.name)
        for route in ROUTES
        if route.name != "openapi"
    ],
)
def test_every_answer_matches_the_openapi_document(route, trained, api):
    path = re.sub(r":[a-z|]+", "", route.path)

    @given(case=api[path][route.method].as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def holds(case):
        if route.name == "events":
            case.query = {**(case.query or {}), "follow": "false"}  # The other form never ends.
        case.call_and_validate(
            base_url=f"http://127.0.0.1:{trained.port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=20,
            # That a text is no job file is more than a schema can say.
            excluded_checks=[positive_data_acceptance] if route.name == "submit" else [],
        )

    holds()


NAMED = (
    "/v1/status",
    "/v1/jobs",
    "/v1/jobs/doc",
    "/v1/jobs/doc/plan",
    "/v1/jobs/doc/history",
    "/v1/jobs/doc/why",
    "/v1/nodes",
    "/v1/nodes/a/logs",
    "/v1/events?follow=false",
)


@pytest.mark.parametrize("path", NAMED)
def test_existing_resources_match_their_schemas(path, trained, api):
    """Random requests hardly guess the names of what is there."""
    import jsonschema  # noqa: PLC0415 - a test of its own

    document = json.loads(json.dumps(api.raw_schema))
    code, value = trained.ask("GET", path)
    assert code == 200, value
    template = path.partition("?")[0].replace("/doc", "/{job}").replace("/a/", "/{node}/")
    content = document["paths"][template]["get"]["responses"]["200"]["content"]
    if "application/json" not in content:
        assert isinstance(value, str)
        return
    shape = content["application/json"]["schema"] | {"components": document["components"]}
    jsonschema.Draft202012Validator(shape).validate(value)
