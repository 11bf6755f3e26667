"""Redaction: tokens, keys, secrets and passwords become `***` before they are stored or shown.

Runs and reports are attached to bug reports, so in doubt a value is hidden: the provenance loses a
harmless value with a suspicious name, and nothing else depends on that value. A secret that has
neither a telling name nor a known shape cannot be recognised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
# Some of the patterns take quadratic time, and a program's text may have any length.
_LONGEST = 4096
# Values may contain assignments themselves; deeper ones are hidden without looking.
_DEEPEST = 6

# Hidden whatever the value is, and wherever they occur in a name.
_STRONG = (
    "secret",
    "password",
    "passwd",
    "passphrase",
    "passcode",
    "credential",
    "authorization",
    "authtoken",
    "accesstoken",
    "apikey",
    "apitoken",
    "accesskey",
    "privatekey",
    "secretkey",
    "bearer",
    "jwt",
    "cookie",
    "mnemonic",
    "seedphrase",
    "passwort",
)
_STRONG_WORDS = frozenset(
    ("pwd", "pw", "pass", "pat", "creds", "cred", "sas", "passw", "psw", "psk", "otp", "totp")
)
# Hidden, unless they are not the last word of the name and the value is only a number:
# `--pad-token-id 0` stays.
_WEAK_WORDS = frozenset({"auth", "signature", "sig"})
_PLURALS = ("tokens", "keys")
_TRADE = ("key", "keys", "token", "tokens")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_COUNT = re.compile(r"[\d.,:+\-]{1,12}")

_SHAPES = re.compile(
    r"""
      -----BEGIN[A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | \b eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?                  # JSON web token
    # Plain short words are none: `hf_pretrained` is an architecture.
    | \b (?:hf|api_org)_(?=[a-z]*[A-Z0-9]|[a-z]{20})[A-Za-z0-9]{8,}
    | \b (?:sk|pk|rk)[-_][A-Za-z0-9_-]{8,}
    | \b (?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{8,}
    | \b gl(?:pat|dt|rt|cbt)-[\w-]{8,}
    | \b (?:AKIA|ASIA|AIDA|AROA)[A-Z0-9]{8,}
    | \b AIza[\w-]{16,}
    | \b ya29\.[\w-]{8,}
    | \b (?:xox[a-z]|xapp)-[\w-]{8,}
    | \b (?:npm|pypi|dop_v1|doo_v1|r8|gsk|tgp|nvapi|key|secret|pat|lin_api|shpat|dckr_pat|ntn)
         [-_](?=[\w-]*\d)[A-Za-z0-9_-]{16,}
    | \b SG\.[\w-]{8,}\.[\w-]{8,}
    | \b AGE-SECRET-KEY-[A-Z0-9]{8,}
    | \b (?:hvs|hvb|hvr)\.[\w-]{8,}
    | \b (?:glsa|whsec|figd|rubygems|sntrys|phc|tvly|xai|pplx|vlt)[-_](?=[\w-]*\d)[\w-]{12,}
    | \b dapi[0-9a-f]{32}\b
    | \b (?:AC|SK)[0-9a-f]{32}\b
    | (?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/]{8,}
    | (?<=/api/webhooks/)\d+/[\w-]{8,}                         # Discord
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_USER = re.compile(r"(?<=://)[^\s/?#]*@")
_USER_AT_HOST = re.compile(r"(?<![\w.@/:-])([\w.+-]{1,64}):[^\s/@:'\"]{1,200}@(?=[\w-]+[.:/\w-]*)")
"""`name:password@host` without a scheme, as database addresses are often given."""
# What goes on behind a dot is a file's name; a dot alone ends a sentence.
_KEY = re.compile(r"(?<![\w/+.-])(?:0x)?[A-Za-z0-9+/_-]{32,}={0,2}(?![\w/+-]|\.[\w-])")
_HEX = re.compile(r"(?:0x)?[0-9a-fA-F]{32,}")
_SHORTEST_WORDS = 3.2
"""Letters of an ordinary word, at least, on the average of a long name.

Pieces of one case in base64 have 1.9 letters; 1 in 1 000 keys of 32 letters has 3.2, longer keys
are rarer. Of 566 295 files of a Linux machine 4 would be hidden: digests of 32 letters in a path.
"""
_IDENTIFIES = frozenset(
    ("revision", "rev", "commit", "sha", "hash", "digest", "checksum", "md5", "sha256", "id")
)
"""Options whose value may be as long as a key, but only identifies a version of something."""
_USERS = frozenset(("u", "user", "username", "login", "proxy", "account"))
_LOGIN = re.compile(r"([^\s:/@]{1,64}):(\S+)")
# Words that begin with -p and are options themselves: `-path x`, `-precision fp16`.
_NO_PASSWORD = re.compile(
    r"-p(?:ath|re|ro|ort|rint|ara|art|lo|lug|ad|at|ag|ha|la|ip\Z|db\Z|y\Z|p\Z|er|oo|os|i[cpx]|ac)"
    r"[a-z0-9_-]*\Z|-p\Z"
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|x-[\w-]{0,40}(?:key|token|secret)|(?:set-)?cookie)(\s*[:=]\s*)"
    r"([^\"'\n]+)"
)
_SCHEME = re.compile(r"(?i)\b(bearer|(?:basic|token)(?=\s+\S*\d))(\s+)([A-Za-z0-9._~+/=-]{8,})")
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
# name=value, name: value, "name": "value", ["name"] = "value", -name value inside one string. A
# value in brackets contains names of its own; if it is nested, only these are checked.
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![\w.\-])[\w.\-]+)(?P<between>[\"']?\]?\s*(?:=|:(?!//))\s*|[\"']?\s*:\s+)"
    rf"(?P<value>{_QUOTED}|[{{\[][^{{}}\[\]]*[}}\]]|(?![{{\[])[^\s,;&}})\]]+)"
)
# The arguments of `os.putenv("HF_TOKEN", "abc")`.
_LISTED = re.compile(
    r"(?P<name>[\"'][\w.\-]*(?:token|key|secret|pass|pwd|cred|auth)[\w.\-]*[\"'])(?P<between>\s*,\s*)"
    rf"(?:{_QUOTED})",
    re.IGNORECASE,
)
_FLAGGED = re.compile(
    rf"(?P<name>(?<![\w-])--?[A-Za-z][\w.\-]*)(?P<between>\s+)(?P<value>{_QUOTED}|[^\s]+)"
)
_ATTACHED = re.compile(r"(?<![\w-])-p[^\s=]+(?!\S)")
_FLAG = re.compile(r"--[A-Za-z]|-[A-Za-z]\Z")


def names_a_secret(name: str, value: str = "x") -> bool:
    """Whether a variable, option or field of this name may hold a secret.

    >>> names_a_secret("--hf-token"), names_a_secret("max_new_tokens", "20")
    (True, False)
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    # Compared without separators: api_key, api-key and apiKey are the same name.
    if any(word in plain for word in _STRONG):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    counts = _COUNT.fullmatch(value.strip("\"'")) is not None
    for position, word in enumerate(words):
        if word in _STRONG_WORDS:
            return True
        last = position == len(words) - 1
        if word.endswith(_PLURALS) and not counts:
            return True
        weak = word in _WEAK_WORDS or word.endswith(("token", "key"))
        if weak and (last or not counts):
            return True
    return False


def redact_text(text: str) -> str:
    """Hide everything in a text that looks like a secret, by its shape or its name.

    >>> redact_text("API_KEY=abc python x.py --password 'a b' https://me:pw@host/x")
    'API_KEY=*** python x.py --password *** https://***@host/x'
    """
    return _redact(_shortened(text), 0)


def redact_message(text: str, *, digests: bool = True) -> str:
    """A sentence, where `key` and `token` are ordinary words unless they are options.

    Args:
        text: What was said.
        digests: Whether long hexadecimal numbers stay. In messages of Driftline they are digests of
            tensors and names of runs; what another program raised may quote a key.

    >>> redact_message("past_key_values: sparse, started with --hf-token abc")
    'past_key_values: sparse, started with --hf-token ***'
    >>> redact_message("key 9f86d081884c7d659a2feaa0c55ad015 is refused", digests=False)
    'key *** is refused'
    """
    return _redact(_shortened(text), 0, prose=True, digests=digests)


def _shortened(text: str) -> str:
    """A text cut to a limited length, because not every pattern here takes linear time."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text) - _LONGEST} more characters)"


def _redact(text: str, depth: int, *, prose: bool = False, digests: bool = False) -> str:
    if depth > _DEEPEST:
        return HIDDEN

    def hide(match: re.Match[str]) -> str:
        name, between, value = match["name"], match["between"], match["value"]
        if _FLAG.match(value) and between.isspace():
            # `--use-auth-token --other 1`: the first is a switch, the second has its own value.
            return name + between + inner(value)
        if not prose and name[:1] == "-" and (hidden := _short_secret(name, value)):
            return name + between + hidden
        # In prose the value is judged as a number, so that only a telling name hides what follows.
        judged = "0" if prose and ":" in between else value
        if names_a_secret(name, judged) and not (judged != value and name.lower() in _TRADE):
            # Quotes of JSON stay, so that the text remains readable as JSON.
            quote = value[0] if value[0] in "\"'" and not between.isspace() else ""
            return f"{name}{between}{quote}{HIDDEN}{quote}"
        if "=" in value or ":" in value or value[0] in "\"'":
            return name + between + inner(value)
        return match[0]

    def inner(value: str) -> str:
        return _redact(value, depth + 1, prose=prose, digests=digests)

    def hide_key(match: re.Match[str]) -> str:
        stays = digests and _HEX.fullmatch(match[0]) is not None
        return match[0] if stays or not _looks_random(match[0]) else HIDDEN

    # Shapes first, because they need no name; then ever more general patterns.
    text = _SHAPES.sub(HIDDEN, text)
    text = _URL_USER.sub(HIDDEN + "@", text)
    text = _USER_AT_HOST.sub(rf"\1:{HIDDEN}@", text)
    text = _KEY.sub(hide_key, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    text = _ASSIGNED.sub(hide, text)
    if not prose:
        text = _LISTED.sub(_listed, text)
    text = _FLAGGED.sub(hide, text)
    return text if prose else _ATTACHED.sub(_attached, text)


def _listed(match: re.Match[str]) -> str:
    name, between = match["name"], match["between"]
    word = name.strip("\"'")
    # In lists of words, such as columns, these words do not name a secret.
    if word.lower() in _TRADE or not names_a_secret(word):
        return match[0]
    return f"{name}{between}'{HIDDEN}'"


def _attached(match: re.Match[str]) -> str:
    """Hide the password of `-psecret`, as mysql takes it."""
    argument, value = match[0], match[0][2:]
    # `-password x` and `-private-key x` are options; `-psecret` is the password "secret".
    named = names_a_secret(argument) and not value.lower().startswith(_STRONG)
    if _NO_PASSWORD.match(argument) or _COUNT.fullmatch(value) or named:
        return argument
    return f"-p{HIDDEN}"


def _looks_random(text: str) -> bool:
    """Whether a long text is hexadecimal, or base64, whose letters change their case all the time.

    >>> _looks_random("9f86d081884c7d659a2feaa0c55ad015"), _looks_random("a" * 40)
    (True, False)
    >>> _looks_random("checkpoints/Llama-3-8B-Instruct-v0001")
    False
    """
    if _HEX.fullmatch(text):
        return len(set(text)) > 6
    kinds = any(map(str.isupper, text)), any(map(str.islower, text)), any(map(str.isdigit, text))
    return all(kinds) and len(text) < _SHORTEST_WORDS * len(_WORDS.findall(text))


def _identifies(option: str) -> bool:
    return bool(_IDENTIFIES & {word.lower() for word in _WORDS.findall(option)})


def _short_secret(option: str, value: str) -> str:
    """The value after a one-letter option or a user option, hidden if it holds a password; else
    empty.

    `-p x` may be a password, a port or a path: numbers stay, everything else is hidden.
    """
    if option == "-p" and _COUNT.fullmatch(value) is None:
        return HIDDEN
    last_word = option.lower().replace("_", "-").rpartition("-")[2]  # `--proxy-user`, `-u`
    login = _LOGIN.fullmatch(value) if last_word in _USERS else None
    if login is not None and not (login[1].isdigit() and login[2].isdigit()):  # docker's uid:gid
        return f"{login[1]}:{HIDDEN}"
    return ""


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line with its secrets hidden, argument by argument.

    >>> redact_argv(["x.py", "--hf-token", "abc", "--api_key=def", "--max-tokens", "5"])
    ['x.py', '--hf-token', '***', '--api_key=***', '--max-tokens', '5']
    >>> redact_argv(["mysql", "-p", "abc", "-pabc", "--user", "bob:abc", "-precision", "fp16"])
    ['mysql', '-p', '***', '-p***', '--user', 'bob:***', '-precision', 'fp16']
    """
    shown: list[str] = []
    waiting = ""
    for argument in map(_shortened, argv):
        if waiting and not _FLAG.match(argument):
            if hidden := _short_secret(waiting, argument):
                shown.append(hidden)
                waiting = ""
                continue
            if _identifies(waiting) and _HEX.fullmatch(argument):
                shown.append(argument)
                waiting = ""
                continue
        # The option before this argument may take a secret as its value.
        if waiting and not _FLAG.match(argument) and names_a_secret(waiting, argument):
            shown.append(HIDDEN)
            waiting = ""
            continue
        waiting = ""
        name, equals, value = argument.partition("=")
        if equals and name.startswith("-"):
            if hidden := _short_secret(name, value):
                shown.append(f"{name}={hidden}")
                continue
            if _identifies(name) and _HEX.fullmatch(value):
                shown.append(argument)
                continue
        if argument.startswith("-") and not equals:
            # An argument with blanks is a text, such as code for `python -c`; no value follows it.
            waiting = argument if not any(c.isspace() for c in argument) else ""
        if equals and re.fullmatch(r"[\w.+\-/]+", name) and names_a_secret(name, value):
            # A key in base64 may end with an equals sign, and is no name.
            shown.append(f"{_redact(name, 0)}={HIDDEN}")
        else:
            shown.append(_redact(argument, 0))
    return shown


def redact_value(name: str, value: str) -> str:
    """The value of an environment variable, hidden if its name or shape is that of a secret."""
    return HIDDEN if names_a_secret(name, value) else redact_text(value)
