"""Keep secrets out of texts.

A secret is recognized by one of three properties:

- its value: secrets that a caller names, secrets of the environment, and credentials in the URLs of settings;
- its name: values assigned to ``api_key``, ``hfToken`` or ``password``, in a text or under a key;
- its form: tokens of well-known services, private keys, headers, credentials and queries of complete URLs.

Every text that leaves the process passes through `hide_secrets` (for the operator of this machine: logs, tracebacks,
warnings) or `hide_environment` (for texts that are sent or stored: events, terminal payloads). Both take time
proportional to the length of the text, whatever its content.
"""

from __future__ import annotations

import functools
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, quote, unquote

from .urls import hide_urls

HIDDEN: Final = "<hidden>"
SHORTEST_SECRET = 4
SHORTEST_OF_SECRET_NAME = 6
SHORTEST_OF_ANY_NAME = 16
"""A value of this length may be a secret, whatever the name of its variable or query parameter."""
LONGEST_TEXT = 64 * 1024
"""Maximum number of characters read of an exception's text, because hiding its secrets copies it a dozen times."""
LONGEST_WORD = 4096
"""A text that is too long is cut at most this many characters earlier than necessary, between two words."""
MOST_LINES = 400
"""Maximum number of entries kept of a traceback, half from its beginning and half from its end."""

_SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH|SIGNATURE", re.IGNORECASE)
_SETTING = re.compile(rf"TRAINER_TOKEN_ORIGINS|(?:TENSORHUB_URL|TRAINER_)(?!.*({_SECRET_VARIABLE.pattern})).*")
"""Variables of a run. Messages must be able to show their values: only the credentials in their URLs are hidden."""
_NO_SECRETS = frozenset(["default", "disabled", "enabled", "required", "optional"])

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORD = re.compile(
    r"\w*(token|secrets?|passwords?|passwd|passphrase|credentials?|signature|authorization|(api|access|secret|private)key)"
    r"|pwd|auth|cookie|sig|sas"
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
"""Words that show that a name ending in ``token`` means a token of a vocabulary and not a secret."""

# Each pattern decides after a bounded number of characters, so that a match takes time in proportion to the length.
_ASSIGNED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{1,200}+)[\"']?\s{0,4}(?:=|:(?=\s{0,4}(?:[bru]?[\"']|\S{0,64}\d)))\s{0,4}"
    r"(?:[bru]?(?P<quote>[\"']))?"
)
"""Matches the key and separator before a value: ``api_key=…``, ``"api_key": "…"`` and, if the value has a digit,
``api_key: …``."""
_VALUES = {
    None: re.compile(r"(?!\$)[^\s\"'&,;<>(){}\[\]]{6,}"),
    "'": re.compile(r"[^'\n]{4,4096}"),
    '"': re.compile(r'[^"\n]{4,4096}'),
}
"""Matches the value, by the quote before it."""
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
    r"|-----BEGIN (?:[A-Z]{1,16} ){0,3}PRIVATE KEY-----[^-]*(?:-----END (?:[A-Z]{1,16} ){0,3}PRIVATE KEY-----)?"
)
"""Tokens of GitHub, GitLab, Hugging Face, OpenAI and the like, Slack, AWS and Google; JSON Web Tokens; private keys."""


def redact(text: str, secrets: Iterable[str | None]) -> str:
    """Replace every secret in `text`, also in its JSON and URL spellings.

    Very short values are not secrets, because they would blot out every message.
    """
    return _replace_all(text, _hidden_by(secrets))


def hide_secrets(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """Return `text` for a log: without `secrets`, credentials in URLs, and likely secrets.

    Likely secrets are recognized in the text by their form or name, and in the environment by the name of the variable
    or the length of the value.

    Paths and short values of the environment stay, because a traceback is useless without them.
    """
    return _hide(text, rf"[^\s/]{{{SHORTEST_OF_ANY_NAME},}}", secrets, environ)


def hide_environment(text: str, *, secrets: Iterable[str | None] = (), environ: Mapping[str, str] | None = None) -> str:
    """Return `text` for use elsewhere: without `secrets`, credentials in URLs, and values of the environment.

    Values of fewer than 6 characters stay: ``1`` or ``true`` are part of many texts. A run's settings (``TRAINER_…``)
    stay too, without the credentials of their URLs.
    """
    return _hide(text, r"(?s:.*)", secrets, environ)


def _hide(text: str, of_any_name: str, secrets: Iterable[str | None], environ: Mapping[str, str] | None) -> str:
    """Return `text` without `secrets`, likely secrets, and the values of the environment from `_values_of`."""
    return _without_known_forms(hide_urls(_replace_all(text, _values_of(environ, of_any_name) | _hidden_by(secrets))))


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether a field named `name` holds a secret: ``api_key``, ``hfToken``, ``password``, but not ``pad_token``."""
    words = ["", "", *(word.lower() for word in _WORD.findall(name))]
    kind, last = words[-2:]
    if last in ("token", "tokens") and not _KINDS_OF_TOKENS.isdisjoint(words):
        return False
    return (
        _SECRET_WORD.fullmatch(last) is not None
        or (kind, last) == ("secret", "access")
        or (kind in _KINDS_OF_SECRETS and last in ("key", "keys", "tokens"))
    )


def secrets_in(value: Any) -> list[str]:
    """Return the secrets in a decoded JSON value: by name, by form, and credentials of URLs."""
    found: dict[str, None] = {}

    def note(text: str, is_secret: bool) -> None:
        if is_secret and _may_be_secret(text):
            found[text] = None
        found.update(dict.fromkeys([*_secrets_of_url(text), *(match[0] for match in _TOKEN.finditer(text))]))

    map_strings(value, note)
    return list(found)


def secrets_of_module(module: object) -> list[str]:
    """Return the secrets among the hyperparameters of a LightningModule and of the job that it hosts."""
    job_hyperparams = getattr(getattr(module, "job", None), "hyperparams", None)
    found = (job_hyperparams, getattr(module, "hparams", None))
    return secrets_in([hyperparams for hyperparams in found if isinstance(hyperparams, Mapping)])


def without_secrets(value: Any, *, secrets: Iterable[str | None] = ()) -> Any:
    """Return a decoded JSON value without `secrets`, and without secrets by name, by form or in URLs."""
    known = tuple(secrets)

    def shown(text: str, is_secret: bool) -> str:
        return HIDDEN if is_secret else _without_known_forms(hide_urls(redact(text, known)))

    return map_strings(value, shown)


def map_strings(value: Any, act: Callable[[str, bool], Any], is_secret: bool = False) -> Any:
    """Replace each text in `value` by ``act(text, is_secret)``; `is_secret` is true under a secret name."""
    if isinstance(value, Mapping):
        return {name: map_strings(inner, act, is_secret or is_secret_name(str(name))) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(inner, act, is_secret) for inner in value]
    return act(value, is_secret) if isinstance(value, str) else value


def secrets_of_environment(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the values of variables with secret names, and the credentials in the URLs of settings."""
    return list(_values_of(environ, ""))


def safe_str(error: BaseException) -> str:
    """Return `str(error)`, truncated; a placeholder if `str` itself fails."""
    try:
        return _cut(str(error))
    except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything here
        return f"<its text raised {type(problem).__name__}>"


def traceback_of(error: BaseException | traceback.TracebackException) -> str:
    """Return the traceback of an exception with its causes; only the beginning and the end of a very long one."""
    kind = traceback.TracebackException
    entries = list((error if isinstance(error, kind) else kind.from_exception(error, compact=True)).format())
    if len(entries) > MOST_LINES:
        entries[MOST_LINES // 2 : -MOST_LINES // 2] = [f"  … {len(entries) - MOST_LINES} entries omitted …\n"]
    return "".join(map(_cut, entries)).rstrip()


def _cut(text: str) -> str:
    """Return the beginning of a very long text, without its last word: that might be half a secret."""
    if len(text) <= LONGEST_TEXT:
        return text
    end = LONGEST_TEXT - LONGEST_WORD
    return f"{text[:end]}{text[end:LONGEST_TEXT].rpartition(' ')[0]}…\n"


def _values_of(environ: Mapping[str, str] | None, of_any_name: str) -> dict[str, str]:
    """Return the values of the environment that must be hidden, with their replacements.

    These are the values of variables with secret names, the credentials in the URLs of settings, and values of other
    variables that match the regular expression `of_any_name` and are not also the value of a setting.
    """
    variables = dict(os.environ if environ is None else environ)
    plain = {value for name, value in variables.items() if _kind_of_variable(name) == "setting"}
    found = {secret: HIDDEN for value in plain for secret in _secrets_of_url(value)}
    for name, value in variables.items():
        is_hidden = _kind_of_variable(name) == "secret" or (value not in plain and re.fullmatch(of_any_name, value))
        if is_hidden and _may_be_secret(value):
            found.setdefault(value, f"${name}")
    return found


@functools.lru_cache(maxsize=1024)
def _kind_of_variable(name: str) -> Literal["setting", "secret", "other"]:
    if _SETTING.fullmatch(name):
        return "setting"
    return "secret" if _SECRET_VARIABLE.search(name) else "other"


def _may_be_secret(value: str) -> bool:
    return len(value) >= SHORTEST_OF_SECRET_NAME and value.lower() not in _NO_SECRETS


def _hidden_by(secrets: Iterable[str | None]) -> dict[str, str]:
    return {secret: HIDDEN for secret in secrets if secret and len(secret) >= SHORTEST_SECRET}


def _secrets_of_url(url: str) -> Iterator[str]:
    """Yield the password of a URL, and likely credentials in its query; nothing for another text."""
    rest, _, query = url.partition("://")[2].partition("?")
    userinfo = rest.partition("/")[0].rpartition("@")[0]
    found = [userinfo.partition(":")[2] or userinfo]
    for name, value in parse_qsl(query.partition("#")[0]):
        found += [value] if len(value) >= SHORTEST_OF_ANY_NAME or is_secret_name(name) else []
    for secret in found:
        if len(secret) >= SHORTEST_OF_SECRET_NAME:
            yield from dict.fromkeys((secret, unquote(secret)))


def _without_known_forms(text: str) -> str:
    """Return `text` without tokens and private keys of a known form, headers, and values assigned to secret names."""
    text = _HEADER.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, text))
    shown, end = [], 0
    for assigned in _ASSIGNED.finditer(text):
        value = _VALUES[assigned["quote"]].match(text, assigned.end())
        if value is not None and assigned.start() >= end and is_secret_name(assigned["name"]):
            shown += [text[end : value.start()], HIDDEN]
            end = value.end()
    return "".join([*shown, text[end:]])


def _replace_all(text: str, hidden: Mapping[str, str]) -> str:
    """Replace each key of `hidden` in `text` by its value, longer keys first, because they may contain others."""
    for value in sorted(hidden, key=len, reverse=True):
        for spelling in _spellings(value):
            text = text.replace(spelling, hidden[value])
    return text


@functools.lru_cache(maxsize=512)
def _spellings(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((value, json.dumps(value)[1:-1], quote(value.encode(errors="replace"), safe=""))))
