"""What is found and removed in text, and what is left alone."""

from pathlib import Path

import pytest

from composer_jax.serve.traffic.redaction import OVERLAP, WINDOW, has_secret, has_secret_ids, redact
from tests.serve.traffic.planted_secrets import planted

ROOT = Path(__file__).parents[3]


def test_planted_secrets_are_found_and_removed():
    for text, secret in planted(420):
        assert has_secret(text), text
        assert secret not in redact(f"before {text} after"), text


@pytest.mark.parametrize(
    "text",
    [
        "password=hunter2xyz",
        "  DB_PASSWORD=hunter2abc",
        "docker run -e API_KEY=abcdef123456 image",
        "ENV API_KEY=abc123def",
        "db_password: hunter2xyz",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "token: 4c509789a1b2c3d4e5f60718293a4b5c",
        "authorization: bearer abcdefghijklmnop1234",
        "Authorization: Basic YWxhZGRpbjpvcGVuc2VzYW1l",
        "AccountKey=Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFy==;",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----",
        "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    ],
)
def test_forms_without_quotes_are_found(text):
    assert has_secret(text) and "[secret]" in redact(text)


def test_a_text_that_begins_a_token_again_and_again_is_searched_in_one_pass():
    assert not has_secret("eyJ-" * 250_000)  # 10^11 steps, if each beginning were followed to the end


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=4096, token_ids = prompt[2:10]",
        "tokens: np.float32 = token_table[i1](text2)",
        "secret = load2(path)",
        "token = tokenizer.next_token(position)",
        "password: str = field(default='')",
        "commit 4c509789a1b2c3d4e5f60718293a4b5c6d7e8f90",
        "git@github.com:owner/repository.git",
        "def convertOpenAIChatCompletionsToResponses2(self):",
        "composer_jax/serve/traffic/conversation_tree.py::test_a_very_long_name_of_a_test",
        "API_KEY=$OPENAI_KEY",
        "https://example.org:8080/path",
    ],
)
def test_code_is_no_secret(text):
    assert not has_secret(text) and redact(text) == text


def test_the_sources_of_this_package_have_few_false_alarms():
    files = sorted((ROOT / "composer_jax").rglob("*.py"))
    alarms = [str(file) for file in files if has_secret(file.read_text(encoding="utf-8"))]
    assert len(alarms) <= len(files) * 0.02, alarms


def test_home_folders_and_addresses_are_redacted():
    assert redact("cd /home/alice/src && mail bob@example.org") == "cd [home]/src && mail [email]"
    assert redact(r"C:\Users\alice\x /home/ubuntu/y") == r"[home]\x /home/ubuntu/y"


@pytest.mark.parametrize("place", [0, WINDOW - 20, WINDOW - OVERLAP // 2, 2 * WINDOW + 5])
def test_a_secret_is_found_wherever_it_is_among_many_ids(place):
    secret = planted(2)[1][1]
    ids = [ord("x")] * place + [ord(c) for c in f" {secret} "] + [ord(" ")] * 3000
    assert has_secret_ids(ids, lambda part: "".join(map(chr, part)))
    assert not has_secret_ids([ord(" ")] * 9000, lambda part: "".join(map(chr, part)))
