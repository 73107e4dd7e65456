"""Only Google's word for an instance of this project, for this audience, is a proof."""

from __future__ import annotations

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from sailord.api.access.instance_proof import ProvenInstance, check_proof
from sailord.api.access.webhook_tokens import TokenError, read_keys
from tests.fakes.google_identity import GoogleIdentity

GOOGLE = GoogleIdentity("prod")
WRONG = {
    "another audience": GOOGLE.token("them", "m7", "7"),
    "another signer": GoogleIdentity("prod", generate_private_key(65537, 2048)).token(
        "us", "m7", "7"
    ),
    "another project": GoogleIdentity("theirs").token("us", "m7", "7"),
    "expired": GOOGLE.token("us", "m7", "7", exp=time.time() - 100),
    "an account's": GOOGLE.token("us", "m7", "7", google=None),
    "no project": GOOGLE.token("us", "m7", "7", google={"compute_engine": {"instance_id": "7"}}),
    "no number": GOOGLE.token("us", "m7", "7", google={"compute_engine": {"project_id": "prod"}}),
    "a list": GOOGLE.token("us", "m7", "7", google={"compute_engine": [1]}),
}


@pytest.fixture
def keys(tmp_path):
    return read_keys(GOOGLE.write_keys(tmp_path / "jwks"))


def test_a_token_of_an_instance_says_which_one(keys):
    token = GOOGLE.token("us", "m7", "7")
    assert check_proof(token, keys, audience="us", project="prod") == ProvenInstance("7", "m7")


@pytest.mark.parametrize("token", WRONG.values(), ids=WRONG)
def test_other_tokens_are_no_proof(token, keys):
    with pytest.raises(TokenError):
        check_proof(token, keys, audience="us", project="prod")
