"""Signs tokens as Google does for its instances, with a key of its own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

ID = "key-1"


@cache
def a_key() -> RSAPrivateKey:
    """A key; making one takes long."""
    return generate_private_key(65537, 2048)


@dataclass(frozen=True)
class GoogleIdentity:
    """Google's signer of tokens for one project."""

    project: str = "test-project"
    key: RSAPrivateKey = field(default_factory=a_key)

    def write_keys(self, path: Path) -> Path:
        """Write the keys that verify the tokens."""
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        path.write_text(json.dumps({"keys": [{**public, "kid": ID}]}))
        return path

    def token(self, audience: str, name: str, number: str, **changes: Any) -> str:
        """Return the token of an instance, in the form ``full``."""
        now = time.time()
        claims = {
            "iss": "https://accounts.google.com",
            "aud": audience,
            "sub": "112233445566778899",
            "email": f"sailor-machine@{self.project}.iam.gserviceaccount.com",
            "email_verified": True,
            "iat": now,
            "exp": now + 3600,
            "google": {
                "compute_engine": {
                    "instance_id": number,
                    "instance_name": name,
                    "project_id": self.project,
                    "project_number": 123,
                    "zone": "us-central1-a",
                }
            },
            **changes,
        }
        return jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": ID})
