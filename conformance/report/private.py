"""Removes names that identify a machine or its user from a report, and puts placeholders there."""

import getpass
import os
import re
import socket
from pathlib import Path

from conformance.harness import sites

# Common names, which identify nobody.
GENERIC = {"root", "localhost", "true", "false"}
IDENTIFYING = re.compile(
    r"USER|LOGNAME|HOST|NODE|ACCOUNT|PROJECT|MAIL|SSH|TOKEN|SECRET|PASS|KEY|_PAT$|JWT|CREDENTIAL|AUTH|PROXY", re.IGNORECASE
)
PATTERNS = [
    (re.compile(r"(?<=://)[^/\s@]+@(?=[^/\s])"), ""),  # the user and password in an address
    (re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+"), "<address>"),
    (re.compile(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"""(["'`])(file://)?/(?!/)[^"'`\n]*\1"""), r"\1<path>\1"),  # a quoted path may contain spaces
    (re.compile(r"file://[^\s\"']+"), "<path>"),
    (re.compile(r"(?<![\w/.>])/(?!/)[^\s'\"`,;:()\[\]{}<>|]+"), "<path>"),
]


def names_of_this_machine() -> dict[str, str]:
    """Each identifying name of this machine and user, with its placeholder."""
    hosts = {socket.gethostname(), socket.getfqdn(), os.uname().nodename}
    names = {value: f"<{name}>" for name, value in os.environ.items() if IDENTIFYING.search(name) and len(value) > 2}
    names |= dict.fromkeys(hosts | {host.partition(".")[0] for host in hosts}, "<host>")
    # A space in the home's path would end the patterns for paths early, so the home is replaced first.
    names |= {getpass.getuser(): "<user>", str(Path.home()): "/~", str(sites.ROOT): "<repository>"}
    return {name: word for name, word in names.items() if len(name) > 1 and not name.isdigit() and name not in GENERIC}


def clean(document, names: dict[str, str] | None = None):
    """A copy of the document without names of hosts, users and accounts, absolute paths and addresses."""
    names = names_of_this_machine() if names is None else names
    if isinstance(document, dict):
        return {key: clean(value, names) for key, value in document.items()}
    if isinstance(document, list):
        return [clean(value, names) for value in document]
    if not isinstance(document, str):
        return document
    for name, word in sorted(names.items(), key=lambda pair: -len(pair[0])):
        document = re.sub(rf"(?<![A-Za-z0-9<]){re.escape(name)}(?![A-Za-z0-9>])", word, document, flags=re.IGNORECASE)
    for pattern, word in PATTERNS:
        document = pattern.sub(word, document)
    return document
