"""A site's policy in a file, ``policy.toml``, which the node's configuration and the environment may only narrow.

Whoever starts a node, or changes its environment, can thus make the site stricter, and never more open. An entry that
the file leaves out has its default there. So the file must end with a line that says so (`END`): a file that was cut
between two lines would lack entries, and open the site.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from umbel.privacy.site.policy import Mark, Narrows, Policy
from umbel.protocol.errors import SiteError
from umbel.protocol.options import Options
from umbel.protocol.rules import shown

POLICY_FILE = "policy-file"
END = "# end"
"""The last line of a policy file."""
_KEYS = ("researchers", "parties")


def policy_of(entries: Mapping[str, Any]) -> Policy:
    """Return the policy of a node's entries, narrowed down from the file that they name, if they name one.

    Raises
    ------
    SiteError
        If the file cannot be read, other users can write it, or an entry allows more than the file does.
    """
    if not (name := str(entries.get(POLICY_FILE, ""))):
        return Policy.of(entries)
    path = Path(name)  # with ~, the environment would choose the file
    file = read_policy(path)
    whole, both = Policy.of(file), Policy.of({**file, **entries})
    for entry in entries.keys() - {POLICY_FILE}:
        field = entry.replace("-", "_")
        own, theirs, marks = getattr(both, field), getattr(whole, field), Policy.model_fields[field].metadata
        free = Mark.FREE in marks and entry not in file
        if not (free or _as_strict(own, theirs, marks)):
            raise SiteError(
                f"{entry} = {shown(own)} of this node is neither the same as {shown(theirs)} in {path}, nor stricter; "
                "leave the entry out, or change the file",
                code="site.widens-policy",
            )
    return both


def _as_strict(own: Any, theirs: Any, marks: Iterable[Any]) -> bool:
    """Return whether a value, or each of its options, is the same as another, or stricter by its marks."""
    if isinstance(own, Options):
        kinds = get_type_hints(type(own), include_extras=True)
        return all(_as_strict(value, vars(theirs)[name], get_args(kinds[name])) for name, value in vars(own).items())
    return own == theirs or any(isinstance(mark, Narrows) and mark.stricter(own, theirs) for mark in marks)


def read_policy(path: Path) -> dict[str, Any]:
    """Return the entries of a policy file; lists become words, and a table of public keys name=key pairs."""
    if not path.is_absolute():
        raise SiteError(f"{POLICY_FILE} must be an absolute path, got {str(path)!r}", code="site.relative-path")
    try:
        with path.open("rb") as file:
            if (mode := os.fstat(file.fileno()).st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
                told = f"other users can write {path} (mode {stat.S_IMODE(mode):o}); run: chmod go-w {path}"
                raise SiteError(told, code="site.policy-file")
            text = file.read().decode()
        found = Policy.current(tomllib.loads(text, parse_float=_float))
    except (OSError, ValueError, RecursionError) as error:
        raise SiteError(f"the policy file {path} cannot be read: {error}", code="site.policy-file") from None
    if not found:
        # As while somebody writes it: the defaults would answer more than its owner allows.
        raise SiteError(f"the policy file {path} is empty; give at least one entry", code="site.policy-file")
    if text.rstrip().rpartition("\n")[2].lstrip() != END:
        told = f'the policy file {path} may have been cut: add the last line "{END}", once all entries are there'
        raise SiteError(told, code="site.policy-cut")
    if POLICY_FILE in found:
        raise SiteError(f"{path} names a policy file itself; leave {POLICY_FILE} out", code="site.policy-file")
    return {name: _entry(path, name, value) for name, value in found.items()}


def _float(text: str) -> float | str:
    """Return a number; infinity as text, so that it differs from a number that is too large for this machine."""
    return "inf" if text.lstrip("+") == "inf" else float(text)


def _entry(path: Path, name: str, value: Any) -> Any:
    if name in _KEYS and isinstance(value, dict):
        return " ".join(f"{who}={_middle(path, who, key)}" for who, key in value.items())
    if value == []:
        raise SiteError(f"{path}: {name} lists nothing; list something, or leave it out", code="site.policy-file")
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return " ".join(value)
    return value


def _middle(path: Path, who: str, key: Any) -> str:
    """Return the part of a public key that identifies it."""
    words = [word for word in str(key).split() if word.startswith("AAAA")]
    if len(words) != 1 or len(who.split()) != 1 or "=" in who:
        entry = who.replace("-", "_") in Policy.model_fields
        hint = "; move this entry of the policy above all tables" if entry else ""
        told = f'{path}: write a public key as name = "ssh-ed25519 AAAA…", the line of a public key file, got {who!r}'
        raise SiteError(f"{told}{hint}", code="site.bad-key")
    return words[0]
