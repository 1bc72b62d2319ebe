"""A canary that stands anywhere a secret is known to stand does not survive into a text."""

import json
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st

from genlight.adapter.job.sources import JOB_VARIABLE, VARIABLES
from genlight.adapter.plumbing import redaction
from genlight.adapter.plumbing.failures import describe_failure, safe_text
from genlight.adapter.plumbing.redaction import (
    HIDDEN,
    hide_environment,
    hide_secrets,
    is_secret_name,
    redact,
    safe_str,
    secrets_in,
    traceback_of,
    without_secrets,
)

CANARY = "c4nary-0f-th3-r3d4ct10n"

PLACES = [
    "url: /b/k?X-Amz-Signature={}",
    "Max retries exceeded with url: /b/k?X-Amz-Algorithm=A&X-Amz-Signature={}&x=1 (Caused by x)",
    "404 for http://host/a file?sig={}",
    "404 for http://host/it's?X-Amz-Signature={}",
    'for url "http://host/a?name=it\'s&X-Amz-Security-Token={}"',
    "http://host/x?a=b c&X-Goog-Signature={}",
    "http://user:{}@host/x",
    "http://{}@host/x",
    "ftp://user:{}@host",
    "s3://key:{}@bucket/a",
    "Authorization: Bearer {}",
    "{{'Authorization': 'Bearer {}'}}",
    "('authorization', 'Basic {}')",
    "(b'Authorization', b'Bearer {}')",
    "bearer {} was refused",
    "api_key={}",
    'connect(api_key="{}")',
    "connect(password='{}')",
    "{{'api_key': '{}'}}",
    '{{"hf_token": "{}"}}',
    "secret_access_key = {}",
    "password: {}",
    "AccountKey={};EndpointSuffix=core",
    "myapikey={}",
    'config="api_key={}"',
    "pad_token='x', hf_token='{}'",
]


@pytest.mark.parametrize("hide", [hide_secrets, hide_environment])
@pytest.mark.parametrize("place", PLACES)
def test_a_secret_that_nobody_named_is_known_by_where_it_stands(hide, place):
    assert CANARY not in hide(place.format(CANARY), environ={})


@given(st.sampled_from(PLACES), st.text(max_size=40), st.text(max_size=40))
def test_what_stands_around_it_does_not_matter(place, before, after):
    assert CANARY not in hide_secrets(f"{before} {place.format(CANARY)} {after}", environ={})


@pytest.mark.parametrize(
    "text",
    [
        "unexpected token: identifier",
        "KeyError: 'key'",
        "pad_token='<|endoftext|>'",
        "max_new_tokens=512",
        "sorted(names, key=len)",
        "is /tmp/a there?",
        "is it there (/tmp/a?)",
        'File "/home/me/x.py", line 3, in train_step',
        "token=None, password=None",
        "no bearer certificates here",
        "x? y=3",
    ],
)
def test_words_that_only_look_like_one_are_left(text):
    assert hide_secrets(text, environ={}) == text


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=6, max_size=40), st.text(max_size=20))
def test_a_known_secret_is_found_in_each_of_its_spellings(secret, around):
    secret = f"\u2603{secret}"
    for spelled in (secret, json.dumps(secret)[1:-1], quote(secret, safe="")):
        assert spelled not in redact(f"{around}{spelled}{around}", [secret])


@pytest.mark.parametrize(
    "part", ["a", "?", "/", "a://", "=", "{", "token", "token=", "/a?", "bearer ", "sk-", "'", "a='", "\ud800", "key: "]
)
def test_a_text_of_megabytes_takes_time_in_proportion_to_its_length(part):
    """Anything quadratic would take hours."""
    text = part * (2_000_000 // len(part))

    hide_secrets(text, secrets=[CANARY, part * 50], environ={"API_KEY": "a" * 2000, "OTHER": "token" * 100})


def test_settings_of_a_run_are_no_secrets_but_the_credentials_in_their_urls_are():
    environ = {
        "TRAINER_TOKEN_ORIGINS": "http://hub.example:8080",
        "TRAINER_ARTIFACTS_DIR": "/data/of/mine",
        "TRAINER_PLUGIN": "some_long_module:Trainer",
        "TRAINER_UPLOAD_METRICS_URL": f"https://me:{CANARY}@host/m?sig={CANARY}2",
        "TRAINER_CAPABILITY_TOKEN": CANARY,
        "PWD": "/data/of/mine",
    }
    text = "HTTP 401 from http://hub.example:8080/m; /data/of/mine/x: No space left; some_long_module:Trainer"

    for hide in (hide_secrets, hide_environment):
        assert hide(text, environ=environ) == text
        shown = hide(f"{CANARY} {CANARY}2 {environ['TRAINER_UPLOAD_METRICS_URL']}", environ=environ)
        assert CANARY not in shown
        assert "https://host/m" in shown


@pytest.mark.parametrize("variable", [JOB_VARIABLE, *VARIABLES, "TRAINER_API_KEY", "TRAINERS_CHOICE"])
def test_the_values_of_a_runs_variables_may_be_shown_but_for_its_token(variable):
    shown = variable in {JOB_VARIABLE, *VARIABLES} - {"TRAINER_CAPABILITY_TOKEN"}

    assert (hide_environment(CANARY, environ={variable: CANARY}) == CANARY) is shown


SECRETS = ["api_key", "apiKey", "API_KEY", "hf_token", "wandb_api_key", "db_password", "client_secret", "accessKey"]
OTHERS = ["key", "keys", "lr", "pad_token", "max_tokens", "num_tokens", "monkey", "author", "tokenizer", "sort_key"]


def test_names_of_secrets_are_distinguished_from_similar_names():
    assert [name for name in (*SECRETS, "password", "auth_tokens", *OTHERS) if is_secret_name(name)] == [
        *SECRETS,
        "password",
        "auth_tokens",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.sampled_from(["api_key", "password", "hf_token"]))
def test_secrets_of_hyperparameters_are_found_and_left_out_wherever_they_are_nested(value, name):
    nested = {"a": [value, {"b": {name: CANARY, "more": value}}], name: {"inner": [CANARY]}}

    assert CANARY in secrets_in(nested)
    assert CANARY not in repr(without_secrets(nested))
    assert without_secrets({"a": [1, "x", None]}) == {"a": [1, "x", None]}


def test_credentials_of_urls_in_hyperparameters_are_secrets():
    found = secrets_in({"data": [f"https://me:{CANARY}@host/x", f"s3://b/x?X-Amz-Signature={CANARY}2"]})

    assert set(found) == {CANARY, f"{CANARY}2"}


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError(CANARY)


def test_an_exception_that_cannot_say_what_it_is_has_a_text_all_the_same():
    assert describe_failure(Unspeakable(), has_checkpoint=False).text.startswith("train-step:Unspeakable: ")
    assert CANARY not in safe_text(Unspeakable())
    assert CANARY not in traceback_of(Unspeakable())


def test_a_huge_text_is_cut_before_it_is_looked_through():
    error = ValueError("x" * 200_000_000)

    assert len(safe_str(error)) < 100_000
    assert len(traceback_of(error)) < 200_000
    assert len(safe_text(error)) == 2000


def test_a_long_traceback_keeps_its_beginning_and_its_end():
    cause: BaseException = ValueError("the first")
    for number in range(2000):
        following = ValueError(f"number {number}")
        following.__cause__ = cause
        cause = following
    text = traceback_of(cause)

    assert "the first" in text
    assert "number 1999" in text
    assert "omitted" in text
    assert len(text) < 100_000


FORMS = [
    "ghp_{}",
    "github_pat_{}",
    "glpat-{}",
    "hf_{}",
    "sk-proj-{}",
    "xoxb-{}",
    "Bearer {}",
    "DefaultEndpointsProtocol=https;AccountKey={};EndpointSuffix=core",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n",
    "https://me:{}@host/x",
]


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_known_by_its_form_whatever_its_setting_is_called(form):
    secret = form.format("4kZ0p9Qw2Lx7Vt5Rb8Nd3Ms6")
    settings = {"my_pat": secret, "model": {"headers": [secret]}}
    assert "4kZ0p9Qw2Lx7Vt5Rb8Nd3Ms6" not in json.dumps(without_secrets(settings))
    assert "4kZ0p9Qw2Lx7Vt5Rb8Nd3Ms6" not in hide_secrets(f"it said {secret} today", environ={})


def test_a_text_that_genlight_cuts_has_no_half_of_a_secret(monkeypatch):
    monkeypatch.setattr(redaction, "LONGEST_TEXT", 40)
    monkeypatch.setattr(redaction, "LONGEST_WORD", 30)
    error = ValueError(f"the key was {CANARY * 2}")

    assert safe_str(error) == "the key was…\n"
    assert CANARY[:8] not in traceback_of(error)


def test_what_looks_a_little_like_a_secret_stays():
    for text in ("sk-learn-like-estimator", "task-0123456789abcdef0123", "data/part-?x.parquet", "hf_hub", "eyJ.x"):
        assert without_secrets({"a": text}) == {"a": text}
    assert without_secrets({"secret_access": "abcdef"}) == {"secret_access": HIDDEN}


ENVIRON = {"API_KEY": "s3cret-key", "LONG": "x" * 20, "PWD": "/a/path/that/is/long", "LANG": "en_US.UTF-8", "KEY": "ab"}
SPELLED = 'ab"cd'


def test_secrets_are_replaced_longest_first_also_in_json_except_tiny_ones():
    assert redact('abcdef abcd "ab\\"cd"', ["abcd", "abcdef", SPELLED, "a", None]) == '<hidden> <hidden> "<hidden>"'


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("Bearer my-token!", "Bearer <hidden>!"),
        ("key s3cret-key", "key $API_KEY"),
        ("x" * 20, "$LONG"),
        ('File "/a/path/that/is/long/x.py"', 'File "/a/path/that/is/long/x.py"'),
        ("en_US.UTF-8 ab", "en_US.UTF-8 ab"),
        ("nothing", "nothing"),
        ("GET https://me:pw@host/path?sig=1 now", "GET https://host/path now"),
    ],
)
def test_a_log_keeps_paths_and_short_values(text, safe):
    assert hide_secrets(text, secrets=("my-token", None, ""), environ=ENVIRON) == safe


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ('File "/a/path/that/is/long/x.py"', 'File "$PWD/x.py"'),
        ("en_US.UTF-8 ab", "$LANG ab"),
        ("one two my-token", "one two <hidden>"),
    ],
)
def test_a_text_for_other_machines_has_no_value_of_the_environment_except_tiny_ones(text, safe):
    assert hide_environment(text, secrets=("my-token",), environ=ENVIRON) == safe


def test_a_value_that_contains_a_secret_is_hidden_completely():
    assert hide_environment("see user:my-token", secrets=["my-token"], environ={"A": "user:my-token"}) == "see $A"
