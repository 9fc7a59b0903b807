"""What is taken out of logs, messages and patches, and what is not."""

from __future__ import annotations

import pytest

from infra.logs import redact

LETTERS = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"
HEX = "0123456789abcdef" * 3
SECRETS = {
    "Hugging Face": f"hf_{LETTERS}",
    "AWS id": "AKIA" + LETTERS.upper()[:16],
    "AWS temporary id": "ASIA" + LETTERS.upper()[:16],
    "AWS secret": f"aws_secret_access_key = {(LETTERS + '/+abcd')[:40]}",
    "GitHub": f"ghp_{LETTERS}",
    "GitHub app": f"ghs_{LETTERS}",
    "GitHub fine-grained": f"github_pat_11ABCDEFG0_{LETTERS}",
    "GitLab": f"glpat-{LETTERS[:20]}",
    "OpenAI": f"sk-{LETTERS}",
    "OpenAI project": f"sk-proj-{LETTERS}_{LETTERS}-x",
    "Anthropic": f"sk-ant-api03-{LETTERS}",
    "Slack bot": f"xoxb-123456789012-{LETTERS}",
    "Slack app": f"xapp-1-{LETTERS}",
    "Slack hook": "https://hooks.slack.com/services/T00000000/B00000000/AbCdEfGhIjKlMnOpQrStUvWx",
    "Discord hook": f"https://discord.com/api/webhooks/123456/{LETTERS}",
    "W&B variable": f"WANDB_API_KEY={HEX[:40]}",
    "W&B login": f"wandb login --relogin {HEX[:40]}",
    "W&B netrc": f"machine api.wandb.ai\n  login user\n  password {HEX[:40]}",
    "npm": f"npm_{LETTERS}",
    "PyPI": f"pypi-AgEIcHlwaS5vcmc{LETTERS}{LETTERS}",
    "Prefect Cloud": f"pnu_{LETTERS}",
    "Google": f"AIza{LETTERS[:35]}",
    "SendGrid": f"SG.{LETTERS[:22]}.{LETTERS}",
    "JSON web token": f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{LETTERS}",
    "bearer": f"Authorization: Bearer {LETTERS}",
    "basic": f"Authorization: Basic {LETTERS}==",
    "address": f"postgresql://rlflow:{LETTERS}@db/prefect",
    "address without a user": f"redis://:{LETTERS}@cache:6379/0",
    "address with a password that holds an @": f"postgresql://me:aB3@{LETTERS}@db/prefect",
    "variable": f"export MLFLOW_TRACKING_PASSWORD={LETTERS}",
    "literal": f'"password": "{LETTERS}"',
    "literal in Python": f"api_key = '{LETTERS}'",
}
KEY = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *[(LETTERS * 2)[:64]] * 3, "-----END RSA PRIVATE KEY-----"])


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("around", ["{}", "trainer said: {}, and ended", "+{}", "('{}',)", "a\n{}\nb"])
def test_what_looks_like_a_secret_is_taken_out(name: str, around: str) -> None:
    said = redact(around.format(SECRETS[name]))
    assert "***" in said
    for part in (LETTERS[:8], HEX[:16], LETTERS[-8:], "AbCdEfGhIjKlMnOp", "eyJzdWIi"):
        assert part not in said, said


@pytest.mark.parametrize("sign", ["", "+", "-", " "])
def test_a_private_key_is_taken_out_and_a_patch_keeps_its_lines(sign: str) -> None:
    text = "\n".join(f"{sign}{line}" for line in ["before = 1", *KEY.splitlines(), "after = 2"])
    said = redact(text)
    assert LETTERS[:16] not in said
    assert [line[: len(sign)] for line in said.splitlines()] == [sign] * 7
    assert said.splitlines()[0] == f"{sign}before = 1"
    assert said.splitlines()[-1] == f"{sign}after = 2"


def test_a_private_key_within_json_or_without_its_end_is_taken_out() -> None:
    assert LETTERS[:16] not in redact(KEY.replace("\n", "\\n"))
    assert LETTERS[:16] not in redact(KEY[:150])


@pytest.mark.parametrize(
    "text",
    [
        "rollout/tokens_mean 311, data.max_prompt_tokens=1024, 4096 prompt tokens",
        "commit 898c23e3f0a1b2c3d4e5f60718293a4b5c6d7e8f, sha256 " + HEX,
        "+    password = getpass.getpass()",
        "+    PREFECT_API_AUTH_STRING: ${PREFECT_AUTH:?fill in infra/deploy/docker/.env}",
        "+from transformers import AutoTokenizer; tokenizer = AutoTokenizer.from_pretrained('Qwen/Qwen2.5-7B')",
        "task-1234567890-abcdefghij and risk-1234567890-abcdefghij",
        "http://127.0.0.1:4200/api, s3://bucket/prefix, http://h:80/x?mail=a@b",
        'if "-----BEGIN PRIVATE KEY-----" in text:',
        "MLFLOW_TRACKING_PASSWORD=... and PGPASSWORD=$PGPASSWORD",
        "reward.name=user, secret: no",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redact(text) == text


def test_values_of_secret_variables_are_taken_out_whatever_they_look_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_ACCESS_KEY", "not a usual shape")
    assert redact("it is not a usual shape, it seems") == "it is ***, it seems"


@pytest.mark.parametrize("unit", ["-----BEGIN PRIVATE KEY-----", "a" * 64 + "\n", "://", "sk-a", "eyJaaaaaaaa.", "A_"])
def test_no_text_hangs_the_patterns(unit: str) -> None:
    """One that tries again and again would hold the flow for hours over a long line that a model wrote."""
    assert redact(unit * (400_000 // len(unit)))
