"""Requests to package indexes and model hubs: time limits, retries, and what a no means.

httpx costs 160 ms to import and is needed only where something is fetched, so every import of it
stands inside a function.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from flexlab.core.errors import WeightsError
from flexlab.core.text import clean_line
from flexlab.core.units import show_seconds
from flexlab.weights.progress import Meter

if TYPE_CHECKING:
    import ssl

    import httpx

T = TypeVar("T")

_ERRNO = re.compile(r"^\[Errno -?\d+\] ")

DOCUMENT_MAX_BYTES = 64 * 1024**2
"""Of an index page or a repository's list of files: a bound on memory, no more."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for what. A try that brought new bytes does not count."""

    connect_s: float = 15.0
    stall_s: float = 30.0
    """No byte for so long is a stall: the connection is given up and made anew."""
    tries: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    """Doubled from the first one up to this; a server that asks for more is not waited for."""
    sleep: Callable[[float], None] = time.sleep


Explain = Callable[[int, Mapping[str, str]], WeightsError | None]


@dataclass(frozen=True)
class Access:
    """How one server is reached. Headers and credentials never appear in a message."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    auth: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    client_cert: str | None = None
    verify: bool = True
    proxy: str | None = field(default=None, repr=False)
    explain: Explain | None = None
    """The server's own meaning of a status, where it has one."""


@dataclass(frozen=True)
class Document:
    """A small answer as text, and where it came from in the end."""

    text: str
    content_type: str
    url: str


class Transient(Exception):
    """Worth another try. `progressed`: this one brought something new."""

    def __init__(
        self, why: str, *, code: str, wait_s: float | None = None, progressed: bool = False
    ) -> None:
        super().__init__(why)
        self.why = why
        self.code = code
        self.wait_s = wait_s
        self.progressed = progressed


def open_client(access: Access, patience: Patience) -> httpx.Client:
    """A client for this access; the caller closes it. Raises WeightsError."""
    import httpx

    from flexlab import __version__

    headers = {"User-Agent": f"flexlab/{__version__}", "Accept-Encoding": "identity"}
    limits = httpx.Timeout(patience.stall_s, connect=patience.connect_s)
    try:
        return httpx.Client(
            headers={**headers, **access.headers},
            auth=access.auth,
            verify=_tls(access.verify, access.ca_file, access.client_cert),
            proxy=access.proxy,
            timeout=limits,
            follow_redirects=True,
        )
    except (OSError, ValueError, ImportError) as error:  # ImportError: a SOCKS proxy
        what = access.ca_file or access.client_cert or "the proxy's address"
        raise WeightsError(
            f"cannot use {what}: {clean_line(str(error))}", "pip config list shows the settings"
        ) from error


@cache
def _tls(verify: bool, ca_file: str | None, client_cert: str | None) -> ssl.SSLContext | bool:
    """Trust httpx's own roots and the system's, or exactly those of `ca_file` (as pip does).

    Kept: reading the roots takes 50 ms, and one fetch opens several clients.
    """
    import ssl

    import httpx

    if not verify:
        return False
    if ca_file:
        context = ssl.create_default_context(cafile=ca_file)
    else:
        context = httpx.create_ssl_context()
        context.load_default_certs()
    if client_cert:
        context.load_cert_chain(client_cert)
    return context


def get_document(url: str, access: Access, patience: Patience, meter: Meter) -> Document:
    """Fetch a small text, with retries. Raises WeightsError."""

    def attempt() -> Document:
        with requests_to(url), client.stream("GET", url) as response:
            judge(response, access)
            data = bytearray()
            for block in response.iter_bytes():
                data += block
                if len(data) > DOCUMENT_MAX_BYTES:
                    raise WeightsError(f"{show_url(url)} sends far more than a list of files")
            kind = response.headers.get("content-type", "")
            text = data.decode(response.encoding or "utf-8", errors="replace")
            return Document(text, kind, str(response.url))

    with open_client(access, patience) as client:
        return persist(attempt, patience, meter)


def persist(attempt: Callable[[], T], patience: Patience, meter: Meter) -> T:
    """Call until it succeeds. Raises WeightsError after `patience.tries` tries in vain."""
    vain = 0
    while True:
        try:
            return attempt()
        except Transient as trouble:
            vain = 1 if trouble.progressed else vain + 1
            wait_s = min(patience.first_wait_s * 2 ** (vain - 1), patience.longest_wait_s)
            asked_s = trouble.wait_s or 0.0
            if vain >= patience.tries or asked_s > patience.longest_wait_s:
                raise _given_up(trouble, vain) from trouble
            wait_s = max(wait_s, asked_s)
            meter.say("waiting", f"{trouble.why}; trying again in {show_seconds(wait_s)}")
            patience.sleep(wait_s)


def _given_up(trouble: Transient, tries: int) -> WeightsError:
    if trouble.wait_s:
        when = f"; it asks to wait {show_seconds(trouble.wait_s)}"
    else:
        when = f" ({tries} tries)" if tries > 1 else ""
    return WeightsError(
        f"{trouble.why}{when}",
        "the same command goes on where this one stopped, once the server answers again",
        code=trouble.code,
    )


@contextmanager
def requests_to(url: str) -> Iterator[None]:
    """Turns what httpx raises inside the block into Transient or WeightsError."""
    import httpx

    host = show_host(url)
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise _no_connection(host, error) from error
    except httpx.TimeoutException as error:
        raise Transient(f"no data from {host}", code="weights_stalled") from error
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise Transient(f"the connection to {host} broke", code="weights_broken") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise WeightsError(
            f"{show_url(url)} cannot be fetched: {type(error).__name__}",
            code="weights_unreachable",
        ) from error


def _no_connection(host: str, error: Exception) -> Exception:
    reason = _ERRNO.sub("", clean_line(str(error))) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return WeightsError(
            f"{host} shows a certificate that nobody here trusts",
            "pip config set global.cert /path/to/ca.pem (or SSL_CERT_FILE) names one to trust",
            code="weights_untrusted",
        )
    return Transient(f"cannot reach {host}: {reason}", code="weights_unreachable")


def judge(response: httpx.Response, access: Access) -> None:
    """Raises Transient or WeightsError unless the answer is a success."""
    status = response.status_code
    if response.is_success:
        return
    where = show_url(str(response.url))
    if access.explain and (problem := access.explain(status, response.headers)):
        raise problem
    if status == 429:
        raise Transient(
            f"{show_host(where)} limits how much may be fetched (429)",
            code="weights_rate_limited",
            wait_s=retry_after_s(response.headers),
        )
    if status >= 500 or status == 408:
        raise Transient(
            f"{show_host(where)} answers {status}",
            code="weights_unreachable",
            wait_s=retry_after_s(response.headers),
        )
    if status in (404, 410):
        raise WeightsError(f"{where} is not there ({status})", code="weights_not_found")
    if status in (401, 407):
        raise WeightsError(
            f"{show_host(where)} wants a login ({status})",
            "put it into ~/.netrc or into the index URL of pip",
            code="weights_unauthorized",
        )
    if status == 403:
        raise WeightsError(f"{where} is forbidden to this user (403)", code="weights_forbidden")
    raise WeightsError(f"{where} answers {status}", code="weights_unreachable")


def retry_after_s(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds that a server asks to wait: a number or a date; None when it does not say."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, TypeError, OverflowError):
        return None


def show_url(url: str) -> str:
    """Without user, password, query and fragment: any of them may be a secret."""
    parts = urlsplit(url)
    return clean_line(f"{parts.scheme}://{show_host(url)}{parts.path}")


def show_host(url: str) -> str:
    """Host and port alone."""
    return clean_line(urlsplit(url).netloc.rpartition("@")[2])
