"""Keeps secrets out of texts: tokens, values of the environment, credentials in URLs, headers and assignments.

Whatever leaves the process goes through `hide_secrets` (what an operator of this machine reads: logs, tracebacks,
warnings) or `hide_environment` (what is sent or kept: events, terminal payloads). Both take time in proportion to the
length of the text, whatever it holds.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote

from .urls import hide_urls

__all__ = [
    "HIDDEN",
    "PLAIN_VARIABLES",
    "hide_environment",
    "hide_secrets",
    "is_secret_name",
    "redact",
    "secrets_in",
    "secrets_of_environment",
    "secrets_of_module",
    "text_of",
    "traceback_of",
    "without_secrets",
]

HIDDEN: Final = "<hidden>"
SHORTEST_SECRET = 4
SHORTEST_OF_SECRET_NAME = 6
SHORTEST_OF_ANY_NAME = 16
"""A value as long as this, without blanks and slashes, may be a secret whatever its variable is called."""
LONGEST_TEXT = 64 * 1024
"""Characters of an exception's text that are read: one of 200 MB would be copied a dozen times on its way."""
MOST_LINES = 400
"""Entries of a traceback that are kept, half of them from its beginning and half from its end."""
MOST_CUTS = 1000
"""Places that are looked at where a message was cut in the middle of a secret."""

_OF_PATHS = ("JOB_SPEC_PATH", "PLUGIN", "ARTIFACTS_DIR", "CHECKPOINTS_DIR", "SAMPLES_DIR", "METRICS_DIR", "EVENTS_PATH")
_OF_UPLOADS = ("METRICS_URL", "CHECKPOINT_URL", "SAMPLE_URL", "TERMINAL_URL", "DEADLINE_SECONDS")
_OF_STOPS = ("CANCELLED", "CANCEL_FILE", "MAX_RUNTIME_SECONDS", "STOP_GRACE_SECONDS")
_OF_TRUST = ("ORCHESTRATED", "TOKEN_ORIGINS", "SHARED_ARTIFACTS", "PRIVATE_HOSTS")
PLAIN_VARIABLES: Final = frozenset(
    {
        "TENSORHUB_URL",
        *(f"TRAINER_{name}" for name in (*_OF_PATHS, *_OF_STOPS, *_OF_TRUST)),
        *(f"TRAINER_UPLOAD_{name}" for name in _OF_UPLOADS),
    }
)
"""Settings of a run, which a message must be able to name: only the credentials in their URLs are hidden."""

_CUT = "…"
_SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|SIGNATURE", re.IGNORECASE)

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    [
        *("token", "secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase", "credential"),
        *("credentials", "signature", "authorization", "auth", "apikey", "accesskey", "secretkey", "privatekey"),
        "cookie",
    ]
)
_KINDS_OF_SECRETS = frozenset(
    ["api", "access", "account", "auth", "bearer", "private", "refresh", "secret", "session", "signing", "ssh"]
)
_KINDS_OF_TOKENS = frozenset(
    [
        *("begin", "bos", "class", "cls", "end", "eos", "image", "mask", "max", "min", "new", "num", "pad"),
        *("prompt", "sep", "special", "start", "stop", "unk", "word"),
    ]
)
"""Words that make a ``…_token`` one of a vocabulary."""
_NO_SECRETS = frozenset(["default", "disabled", "enabled", "required", "optional"])

# Each pattern knows after a bounded number of characters whether it matches: a text of a megabyte of any one character
# takes as long as any other.
_NAMES = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|signature|authorization|\bsig|\bsas|"
    r"(?:api|access|account|private|secret|signing)[_-]?key)"
)
_ANY_NAME = re.compile(
    r"token|secret|passw|passphrase|credential|signature|sig|sas|key|authorization|bearer", re.IGNORECASE
)
"""A part of each pattern below, for the many texts that have nothing to hide."""
_NO_VOCABULARY = "".join(f"(?<!{kind}_)" for kind in ("bos", "cls", "eos", "mask", "max", "pad", "sep", "unk"))
_BETWEEN = r"(?:[\"']?\s{0,4}=|[\"']\s{0,4}:)\s{0,4}"
_NOT_HIDDEN_YET = r"(?!\$[A-Z]|<hidden>)"
_QUOTED_ASSIGNMENT = re.compile(
    rf"({_NO_VOCABULARY}{_NAMES}{_BETWEEN}[bru]?)([\"']){_NOT_HIDDEN_YET}(?:(?!\2)[^\n]){{4,4096}}", re.IGNORECASE
)
_ASSIGNMENT = re.compile(
    rf"({_NO_VOCABULARY}{_NAMES}{_BETWEEN}){_NOT_HIDDEN_YET}(?!none\b|true\b|false\b|null\b)[^\s\"'&,;<>(){{}}\[\]]{{6,}}",
    re.IGNORECASE,
)
_LABELLED = re.compile(
    rf"({_NO_VOCABULARY}{_NAMES}:\s{{1,4}}){_NOT_HIDDEN_YET}(?=\S{{0,64}}\d)[^\s\"'&,;<>(){{}}\[\]]{{8,}}",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(\bauthorization\b[\"']?\s{0,4}[:=,]\s{0,4}b?[\"']?(?:\w{1,16}\s{1,4})?|"
    r"\bbearer\s{1,4}(?=[A-Za-z]{0,128}[\d_~+/=-]))"
    r"[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|"
    r"sk-(?=[\w-]{0,64}\d)[\w-]{16,}|xox[abprs]-[\w-]{10,}|A(?:KIA|SIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|"
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?)"
)
"""Tokens of GitHub, GitLab, Hugging Face, OpenAI and its like, Slack, AWS, Google, and JSON Web Tokens."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]{1,16} ){0,3}PRIVATE KEY-----[^-]*(?:-----END (?:[A-Z]{1,16} ){0,3}PRIVATE KEY-----)?"
)
_QUERY_OF_PATH = re.compile(
    r"(/[^\s/?#'\"<>`(){}\[\]|*]{0,256}\?)(?![\s<)\].,;:!?])[^\s'\"<>`]+(?:<hidden>[^\s'\"<>`]*)*"
)
_QUERY_OF_PAIRS = re.compile(r"(?<=[\w.%~+-])\?[^\s=?&'\"<>`]{1,128}=[^\s'\"<>`]*(?:<hidden>[^\s'\"<>`]*)*")


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """`text` with every secret in it replaced; one of a few characters is none, and would blot out every message.

    A secret is found also in its JSON and URL spellings, and where a message was cut in the middle of it.
    """
    return _replaced(text, _hidden_by(secrets))


def hide_secrets(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` of a log without `secrets`, credentials in URLs and what looks like a secret in it or in the environment.

    Paths and short values of the environment stay, because a traceback without them says little.
    """
    variables = dict(os.environ if environ is None else environ)
    found = {value: f"${name}" for name, value in variables.items() if _may_be_secret(name, value)}
    return _without_credentials(_replaced(text, found | _hidden_by([*_secrets_of_settings(variables), *secrets])))


def hide_environment(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` that leaves the machine, without `secrets`, credentials in URLs and values of the environment.

    Values of fewer than 6 characters stay: ``1`` or ``true`` are part of many texts. So do those of `PLAIN_VARIABLES`,
    less the credentials of their URLs.
    """
    variables = dict(os.environ if environ is None else environ)
    found: dict[str, str] = {}
    plain = {variables[name] for name in PLAIN_VARIABLES if name in variables}
    for name, value in variables.items():
        if name in PLAIN_VARIABLES or (value in plain and not _is_secret_variable(name)):
            continue
        if len(value) >= SHORTEST_OF_SECRET_NAME:
            found.setdefault(value, f"${name}")
    return _without_credentials(_replaced(text, found | _hidden_by([*_secrets_of_settings(variables), *secrets])))


def is_secret_name(name: str) -> bool:
    """Whether a field of that name holds a secret: ``api_key``, ``hfToken``, ``password``, but not ``pad_token``."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("token", "tokens") and not _KINDS_OF_TOKENS.isdisjoint(words):
        return False
    return (
        last in _SECRET_WORDS
        or (before, last) == ("secret", "access")
        or (last in ("key", "keys", "tokens") and before in _KINDS_OF_SECRETS)
    )


def secrets_in(value: Any) -> list[str]:
    """The secrets within a decoded JSON value: under the name of one, of a known form, and the credentials of URLs."""
    return list(dict.fromkeys(_secrets_in(value, is_secret=False)))


def secrets_of_module(module: object) -> list[str]:
    """The secrets among the hyperparameters of a LightningModule: its own, and those of the job that it hosts."""
    job_hyperparams = getattr(getattr(module, "job", None), "hyperparams", None)
    found = (job_hyperparams, getattr(module, "hparams", None))
    return secrets_in([hyperparams for hyperparams in found if isinstance(hyperparams, Mapping)])


def without_secrets(value: Any, *, secrets: Iterable[str | None] = ()) -> Any:
    """`value`, a decoded JSON value, without `secrets`, and without those of the name or form of one, or in a URL."""
    return _hidden_in(value, tuple(secrets), is_secret=False)


def _hidden_in(value: Any, known: tuple[str | None, ...], *, is_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _hidden_in(inner, known, is_secret=is_secret or is_secret_name(str(name)))
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_hidden_in(inner, known, is_secret=is_secret) for inner in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret else _without_known_forms(hide_urls(redact(value, known)))


def secrets_of_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """The values of variables whose names are those of secrets, and the credentials in the URLs of settings."""
    variables = dict(os.environ if environ is None else environ)
    named = (value for name, value in variables.items() if _is_secret_variable(name))
    long = [value for value in named if len(value) >= SHORTEST_OF_SECRET_NAME and value.lower() not in _NO_SECRETS]
    return [*long, *_secrets_of_settings(variables)]


def text_of(error: BaseException) -> str:
    """The text of an exception, cut where it is very long; of one that cannot give it, that."""
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything here
        return f"<its text raised {type(problem).__name__}>"
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}{_CUT}"


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception with its causes; of a very long one the beginning and the end."""
    entries = traceback.TracebackException.from_exception(error, compact=True).format()
    first = list(itertools.islice(entries, MOST_LINES // 2))
    left_out, last = 0, deque[str](maxlen=MOST_LINES // 2)
    for entry in entries:
        left_out += len(last) == last.maxlen
        last.append(entry)
    between = [f"  … {left_out} entries left out …\n"] if left_out else []
    lines = (
        line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}{_CUT}\n" for line in (*first, *between, *last)
    )
    return "".join(lines).rstrip()


@functools.lru_cache(maxsize=1024)
def _is_secret_variable(name: str) -> bool:
    return name not in PLAIN_VARIABLES and _SECRET_VARIABLE.search(name) is not None


def _may_be_secret(name: str, value: str) -> bool:
    if len(value) < SHORTEST_OF_SECRET_NAME or name in PLAIN_VARIABLES:
        return False
    if _is_secret_variable(name):
        return True
    return len(value) >= SHORTEST_OF_ANY_NAME and re.search(r"[\s/]", value) is None


def _secrets_of_settings(variables: Mapping[str, str]) -> Iterator[str]:
    for name in PLAIN_VARIABLES:
        if "://" in variables.get(name, ""):
            yield from _secrets_of_url(variables[name])


def _hidden_by(secrets: Iterable[str | None]) -> dict[str, str]:
    return {secret: HIDDEN for secret in secrets if secret and len(secret) >= SHORTEST_SECRET}


def _secrets_in(value: Any, *, is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets_in(inner, is_secret=is_secret or is_secret_name(str(name)))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secrets_in(inner, is_secret=is_secret)
    elif isinstance(value, str):
        if is_secret and len(value) >= SHORTEST_OF_SECRET_NAME and value.lower() not in _NO_SECRETS:
            yield value
        if "://" in value:
            yield from _secrets_of_url(value)
        yield from (found[0] for pattern in (_TOKEN, _PRIVATE_KEY) for found in pattern.finditer(value))


def _secrets_of_url(url: str) -> Iterator[str]:
    """The password of a URL, and what its query may prove with."""
    rest, _, query = url.split("://", 1)[1].partition("?")
    userinfo, at, _ = rest.partition("/")[0].rpartition("@")
    _, colon, password = userinfo.partition(":")
    found = [password if colon else userinfo] if at else []
    pairs = parse_qsl(query.partition("#")[0]) if query else []
    found += [
        inner for name, inner in pairs if len(inner) >= SHORTEST_OF_ANY_NAME or (is_secret_name(name) or name == "sig")
    ]
    for secret in found:
        if len(secret) >= SHORTEST_OF_SECRET_NAME:
            yield from dict.fromkeys((secret, unquote(secret)))


def _without_credentials(text: str) -> str:
    """`text` without what its own form gives away: URLs, paths with a query, and `_without_known_forms`."""
    text = hide_urls(text)
    if "?" in text:
        text = _QUERY_OF_PAIRS.sub(f"?{HIDDEN}", _QUERY_OF_PATH.sub(rf"\1{HIDDEN}", text))
    return _without_known_forms(text)


def _without_known_forms(text: str) -> str:
    """`text` without tokens and private keys of a known form, headers and ``api_key=…``."""
    text = _TOKEN.sub(HIDDEN, _PRIVATE_KEY.sub(HIDDEN, text))
    if _ANY_NAME.search(text) is None:
        return text
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _QUOTED_ASSIGNMENT.sub(rf"\1\2{HIDDEN}", text)
    return _LABELLED.sub(rf"\1{HIDDEN}", _ASSIGNMENT.sub(rf"\1{HIDDEN}", text))


def _replaced(text: str, hidden: Mapping[str, str]) -> str:
    """`text` with each key of `hidden` replaced by its value, a longer one before one that it contains."""
    for value in sorted(hidden, key=len, reverse=True):
        for spelling in _spellings(value):
            if spelling in text:
                text = text.replace(spelling, hidden[value])
            if _CUT in text:
                text = _without_beginning(text, spelling)
    return text


@functools.lru_cache(maxsize=512)
def _spellings(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((value, json.dumps(value)[1:-1], quote(value.encode(errors="replace"), safe=""))))


def _without_beginning(text: str, secret: str) -> str:
    """`text` without the part of `secret` that stands before a cut."""
    parts = text.split(_CUT, MOST_CUTS)
    return _CUT.join([*(_without_end_in(part, secret) for part in parts[:-1]), parts[-1]])


def _without_end_in(text: str, secret: str) -> str:
    """`text` without its end where that is the beginning of `secret`, of some characters at least."""
    tail = text[-SHORTEST_SECRET:]
    length = min(len(secret) - 1, len(text))
    while len(tail) == SHORTEST_SECRET and length >= SHORTEST_SECRET:
        at = secret.rfind(tail, 0, length)
        if at < 0:
            return text
        length = at + SHORTEST_SECRET
        if text.endswith(secret[:length]):
            return text[: len(text) - length] + HIDDEN
        length -= 1
    return text
