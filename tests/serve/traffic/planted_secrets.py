"""Secrets and addresses that tests plant, in many formats."""

import random
import string

WORDS = string.ascii_letters + string.digits


def planted(count, seed=0):
    """Returns `count` texts with the secret in each: (text, secret)."""
    rng = random.Random(seed)

    def some(n, letters=WORDS):
        return "".join(rng.choices(letters, k=n))

    hexadecimal, name = "0123456789abcdef", lambda: some(7, string.ascii_lowercase)
    kinds = [
        lambda: ("aws_access_key_id = {}", "AKIA" + some(16, string.ascii_uppercase + string.digits)),
        lambda: ("git clone with {} please", f"ghp_{some(36)}"),
        lambda: ("{} is the new one", f"github_pat_{some(22)}_{some(40)}"),
        lambda: ("client = OpenAI(api_key='{}')", f"sk-proj-{some(40)}"),
        lambda: ("{}", f"sk-ant-api03-{some(60)}"),
        lambda: ("slack: {}", f"xoxb-{some(11, string.digits)}-{some(24)}"),
        lambda: ("key={}&q=1", f"AIza{some(35)}"),
        lambda: ("stripe {}", f"sk_live_{some(24)}"),
        lambda: ("gitlab {}.", f"glpat-{some(20)}"),
        lambda: ("//registry.npmjs.org/:_authToken={}", f"npm_{some(36)}"),
        lambda: ("hub: {}", f"hf_{some(34)}"),
        lambda: ("cookie {}", f"eyJ{some(20)}.eyJ{some(30)}.{some(43)}"),
        lambda: ("{}", f"-----BEGIN RSA PRIVATE KEY-----\n{some(64)}\n{some(64)}\n-----END RSA PRIVATE KEY-----"),
        lambda: ("x\nDATABASE_PASSWORD={}\n", name() + some(6)),
        lambda: ("export SERVICE_TOKEN='{}'", some(30, hexadecimal)),
        lambda: ('{{"password": "{}"}}', f"{name()}{some(3, string.digits)}"),
        lambda: ("postgres://app:{}@db/main", some(12)),
        lambda: ("Authorization: Bearer {}", some(40, hexadecimal)),
        lambda: ("it prints {} at the end", some(40)),
        lambda: ("Signed-off-by: A <{}>", f"{name()}.{name()}@{name()}.org"),
        lambda: ("mail {}, then wait", f"{name()}+{name()}@{name()}.co.uk"),
    ]
    pairs = [kinds[i % len(kinds)]() for i in range(count)]
    return [(template.format(secret), secret) for template, secret in pairs]
