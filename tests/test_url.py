"""AMQP URLs: accepted forms, error messages, and hidden passwords.

No error and no log line shows a password.
"""

from __future__ import annotations

import logging
import os
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.support.seeds import seeds, soaking
from reliable_mq.errors import ConfigurationError
from reliable_mq.settings import Credentials, Endpoint
from reliable_mq.tls import TLSOptions
from reliable_mq.url import parse_url, redacted, split_user

if TYPE_CHECKING:
    from collections.abc import Callable

CANARY = "CANARY"
names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=50)


# -- hosts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("amqp://u:p@h", [("h", 5672)]),
        ("amqps://u:p@h", [("h", 5671)]),
        ("AMQPS://u:p@h/", [("h", 5671)]),
        ("amqp://u:p@h:99/", [("h", 99)]),
        (
            "amqp://u:p@h1:99,h2,[::1]:98,[fe80::1%25eth0]/v",
            [("h1", 99), ("h2", 5672), ("::1", 98), ("fe80::1%eth0", 5672)],
        ),
        ("amqp://u:p@10.0.0.1?heartbeat=30", [("10.0.0.1", 5672)]),
        ("amqp://u:p@my_host-1.example.", [("my_host-1.example.", 5672)]),
        (["amqp://u:p@h1/v", "amqp://u:p@h2:99/v"], [("h1", 5672), ("h2", 99)]),
        (("amqp://u:p@h1,h2", "amqp://u:p@h3/"), [("h1", 5672), ("h2", 5672), ("h3", 5672)]),
    ],
)
def test_hosts_come_from_one_url_or_several(url: str | list[str], endpoints: list[tuple[str, int]]) -> None:
    assert parse_url(url).endpoints == tuple(Endpoint(*endpoint) for endpoint in endpoints)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("amqp://", "no host"),
        ("amqp:///v", "no host"),
        ("amqp://u:p@/v", "no host"),
        ("amqp://u:p@h1,,h2", "no host"),
        ("amqp://u:p@h1,", "no host"),
        ("amqp://u:p@:5672", "no host"),
        ("amqp://u:p@h:", "port"),
        ("amqp://u:p@h:0", "port"),
        ("amqp://u:p@h:65536", "port"),
        ("amqp://u:p@h:+1", "port"),
        ("amqp://u:p@h:5672x", "port"),
        ("amqp://u:p@::1", "no host"),
        ("amqp://u:p@fe80::1:5672", "IPv6 address in brackets"),
        ("amqp://u:p@[::g]", "not an IPv6 address"),
        ("amqp://u:p@[127.0.0.1]", "not an IPv6 address"),
        ("amqp://u:p@x[::1]", "not an IPv6 address"),
        ("amqp://u:p@::1]", "not an IPv6 address"),
        ("amqp://u:p@[::1]5672", r"other than a port after \[::1\]"),
        ("amqp://u:p@[::1]:", "port"),
        ("amqp://u:p@h%20x", "xn--"),
        ("amqp://u:p@h!", "xn--"),
        ("amqp://u:p@a..b", "between its dots"),
        ("amqp://u:p@.a", "between its dots"),
        ("amqp://u:p@" + "a" * 64, "between its dots"),
        ("amqp://u:p@h,h:5672", "h:5672 is given twice"),
        ("http://u:p@h", "must begin with amqp:// or amqps://"),
        ("amqp:u:p@h", "must begin with"),
        ("h:5672", "must begin with"),
        ("", "must begin with"),
        ("amqp://u:p@h\n", "line end"),
        (" amqp://u:p@h", "space"),
        ("amqp://u:é@h", "not ASCII"),
        ("amqp://u:p@h/v#f", "%23"),
        (["amqp://u:p@h1", "amqps://u:p@h2"], "URL 2 differs from the first in its scheme"),
        (["amqp://u:p@h1", "amqp://u:p@h2", "amqp://u:q@h3"], "URL 3 differs from the first in its credentials"),
        (["amqp://u:p@h1/a", "amqp://u:p@h2/b"], "in its virtual_host"),
        (["amqp://u:p@h1?heartbeat=30", "amqp://u:p@h2"], "in its query"),
        (["amqp://u:p@h", "amqp://u:p@h"], "given twice"),
        ([], "at least one"),
        (None, "not NoneType"),
        (b"amqp://u:p@h", "not bytes"),
        ([b"amqp://u:p@h"], "not bytes"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(url: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_url(url)


# -- credentials and virtual host --------------------------------------------------------------------------------------


@given(username=names, password=names, virtual_host=names)
def test_user_password_and_virtual_host_are_percent_decoded(username: str, password: str, virtual_host: str) -> None:
    quoted = [quote(part, safe="") for part in (username, password, virtual_host[:50])]
    settings = parse_url("amqp://{}:{}@localhost/{}".format(*quoted))
    assert settings.credentials == Credentials(username, password)
    assert settings.virtual_host == virtual_host


@pytest.mark.parametrize(
    ("path", "virtual_host"),
    [("", "/"), ("/", "/"), ("/%2F", "/"), ("/%2f", "/"), ("/v", "v"), ("/a%2Fb", "a/b"), ("/+", "+")],
)
def test_no_path_and_a_lone_slash_mean_the_default_virtual_host(path: str, virtual_host: str) -> None:
    assert parse_url(f"amqp://u:p@h{path}").virtual_host == virtual_host


def test_a_password_may_hold_a_colon() -> None:
    assert parse_url("amqp://u:a:b@h").credentials == Credentials("u", "a:b")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("amqp://u:p@host/v", ("amqp://host/v", "u:p@")),
        ("amqp://u:a[b]@[::1]:5672/v?name=x", ("amqp://[::1]:5672/v?name=x", "u:a[b]@")),
        ("amqp://u:p@q@host", ("amqp://host", "u:p@q@")),
        ("amqp://host/v@w", ("amqp://host/v@w", "")),
        ("amqp://host", ("amqp://host", "")),
        ("no URL", ("no URL", "")),
    ],
)
def test_a_url_is_split_from_its_user(url: str, parts: tuple[str, str]) -> None:
    assert split_user(url) == parts


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "localhost,127.0.0.1:99"])
def test_guest_is_assumed_on_loopback(host: str) -> None:
    assert parse_url(f"amqp://{host}").credentials == Credentials("guest", "guest")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("amqp://h", "no user and password for h:5672"),
        ("amqp://localhost,h", "no user and password for h:5672"),
        ("amqps://h", "no user and password for h:5671"),
        ("amqp://user@h", "user 'user' in the URL has no password"),
        ("amqp://us%40er@localhost", "user 'us@er' in the URL has no password"),
        ("amqp://user:@h", "password of user 'user' is empty"),
        ("amqp://:p@h", "no user name"),
        ("amqp://@h", "no user name"),
        ("amqp://u:p%@h", "password in the URL has a '%'"),
        ("amqp://u:p%4@h", "password in the URL has a '%'"),
        ("amqp://u%zz:p@h", "user name in the URL has a '%'"),
        ("amqp://u:%ff@h", "password in the URL is not UTF-8"),
        ("amqp://u:%00@h", "password holds a NUL"),
        ("amqp://u:p@h/%ff", "virtual host in the URL is not UTF-8"),
        ("amqp://u:p@h//", "more than one '/'"),
        ("amqp://u:p@h/a/b", "more than one '/'"),
        ("amqp://u:p@h/" + 256 * "v", "virtual_host has 256 bytes"),
    ],
)
def test_credentials_and_paths_that_leave_a_doubt_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_url(url)


def test_credentials_beside_the_url_take_the_place_of_its_user() -> None:
    def ask() -> tuple[str, str]:
        return "u", "p"

    assert parse_url("amqps://h", credentials=ask).credentials is ask
    assert parse_url("amqps://h", credentials=Credentials("u", "p")).resolve_credentials() == Credentials("u", "p")
    with pytest.raises(ConfigurationError, match="credentials are given twice"):
        parse_url("amqps://u:p@h", credentials=ask)


def test_external_takes_no_user() -> None:
    url = "amqps://h?auth_mechanism=external&certfile=c.pem"
    settings = parse_url(url)
    assert (settings.mechanism, settings.credentials) == ("EXTERNAL", None)
    assert parse_url("amqps://h", mechanism="EXTERNAL", tls=TLSOptions(cert_file="c")).mechanism == "EXTERNAL"
    for wrong in ("amqps://h?auth_mechanism=external", "amqp://localhost?auth_mechanism=external"):
        with pytest.raises(ConfigurationError, match="client certificate"):
            parse_url(wrong)
    with pytest.raises(ConfigurationError, match="leave credentials out"):
        parse_url(url.replace("//h", "//u:p@h"))


# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_of_the_url_arrives_in_its_type() -> None:
    settings = parse_url(
        "amqps://u:p@h/?heartbeat=30&connection_timeout=2500&channel_max=7&frame_max=8192&auth_mechanism=PLAIN&name=a%20b+c"
        "&cacertfile=%2Fca.pem&certfile=/c.pem&keyfile=/k.pem&server_name_indication=other&verify=verify_peer"
    )
    assert (settings.heartbeat, settings.connect_timeout, settings.channel_max, settings.frame_max) == (
        30,
        2.5,
        7,
        8192,
    )
    assert (settings.mechanism, settings.connection_name) == ("PLAIN", "a b+c")
    assert settings.tls == TLSOptions(
        ca_file="/ca.pem", cert_file="/c.pem", key_file="/k.pem", server_name="other", verify=True
    )


def test_every_option_can_be_an_argument() -> None:
    tls = TLSOptions(server_name="other")
    settings = parse_url(
        "amqps://u:p@h",
        tls=tls,
        heartbeat=30,
        connect_timeout=timedelta(seconds=2.5),
        connection_name="a",
        frame_max=8192,
        channel_max=7,
    )
    assert (settings.heartbeat, settings.connect_timeout, settings.connection_name) == (30, 2.5, "a")
    assert (settings.frame_max, settings.channel_max, settings.tls) == (8192, 7, tls)


def test_amqps_alone_verifies() -> None:
    assert parse_url("amqps://u:p@h").tls == TLSOptions(verify=True)
    assert parse_url("amqp://u:p@h").tls is None


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("heartbeat=30s", "heartbeat=30s in the URL is not a whole number"),
        ("heartbeat=-1", "heartbeat=-1 in the URL"),
        ("heartbeat=+30", "heartbeat="),
        ("heartbeat=%D9%A3", "heartbeat="),
        ("heartbeat=0", "heartbeat must be .* cannot be switched off"),
        ("heartbeat=", "option heartbeat in the URL has no value"),
        ("heartbeat", "option heartbeat in the URL has no value"),
        ("heartbeat=30&heartbeat=30", "option heartbeat is in the URL twice"),
        ("connection_timeout=30", "connection_timeout=30 in the URL .* milliseconds"),
        ("connection_timeout=2.5", "connection_timeout=2.5 in the URL"),
        ("frame_max=4096", "frame_max must be"),
        ("channel_max=0", "channel_max must be"),
        ("auth_mechanism=amqplain", "auth_mechanism=amqplain in the URL is not one of plain, external"),
        ("name=%", "name in the URL has a '%'"),
        ("no_verify_ssl=false", "unknown option 'no_verify_ssl'.*known are auth_mechanism, heartbeat"),
        ("ssl_options=x", "unknown option 'ssl_options'"),
        ("Heartbeat=30", "unknown option 'Heartbeat'"),
        ("heart%62eat=30", "unknown option"),
        ("", "unknown option ''"),
        ("heartbeat=30&", "unknown option ''"),
        ("heartbeat=30;frame_max=8192", "heartbeat="),
        ("verify=verify_none", r"verify in the URL .*TLSOptions\(verify=False\)"),
        ("verify=false", "verify in the URL"),
        ("server_name_indication=disable", "server_name_indication=disable"),
        ("keyfile=k.pem", "key_file is given without cert_file"),
    ],
)
def test_an_option_that_is_not_understood_is_refused_by_name(query: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_url(f"amqps://u:p@h/?{query}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat": 31}, "heartbeat is given twice"),
        ({"connect_timeout": 1}, "connect_timeout is given twice"),
        ({"connection_name": "b"}, "connection_name is given twice"),
        ({"frame_max": 9000}, "frame_max is given twice"),
        ({"mechanism": "PLAIN"}, "mechanism is given twice"),
        ({"tls": TLSOptions()}, "cacertfile is in the URL beside the tls argument"),
    ],
)
def test_an_option_in_two_places_is_refused(options: dict[str, Any], message: str) -> None:
    url = "amqps://u:p@h?heartbeat=30&connection_timeout=2500&frame_max=8192&auth_mechanism=plain&name=a&cacertfile=ca.pem"
    with pytest.raises(ConfigurationError, match=message):
        parse_url(url, **options)


@pytest.mark.parametrize("query", ["cacertfile=c", "certfile=c", "server_name_indication=h", "verify=verify_peer"])
def test_tls_options_do_not_go_with_plaintext(query: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{query.partition('=')[0]} is given, but .* use amqps://"):
        parse_url(f"amqp://u:p@h?{query}")
    with pytest.raises(ConfigurationError, match=r"tls is given, but .* use amqps://"):
        parse_url("amqp://u:p@h", tls=TLSOptions())


# -- logs and secrets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "warnings"),
    [
        (f"amqp://u:{CANARY}@localhost,127.0.0.1", []),
        (f"amqps://u:{CANARY}@h", []),
        (f"amqp://u:{CANARY}@localhost,h1,h2", ["plaintext AMQP to h1:5672"]),
        (f"amqps://u:{CANARY}@h?heartbeat=4", ["a heartbeat of 4 s is too short"]),
        (f"amqps://u:{CANARY}@h?heartbeat=5", []),
    ],
)
def test_what_is_risky_is_logged_once_and_without_secrets(
    url: str, warnings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    parse_url(url)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(warnings)
    for warning, message in zip(warnings, caplog.messages, strict=True):
        assert message.startswith(warning)
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        f"amqp://u:{CANARY}",
        f"amqp://u:{CANARY}@",
        f"amqp://u:1/{CANARY}@h",
        f"amqp://u:1?{CANARY}@h",
        f"amqp://u:1?{CANARY}=x@h",
        f"amqp://u:1?heartbeat={CANARY}@h",
        f"amqp://u:1@{CANARY}@h",
        f"amqp://u:1,{CANARY}@h:x",
        f"amqp://localhost:1/{CANARY}@h",
        f"amqp://u:1#{CANARY}@h",
        f"amqp://u:%{CANARY}@h",
        f"amqp://u:%ff{CANARY}@h",
        f"amqps://u:p@h?password={CANARY}",
        [f"amqp://u:{CANARY}@h", "amqp://u:p@h2"],
    ],
)
def test_a_password_in_the_wrong_place_is_not_shown(url: str | list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url)
    assert CANARY not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("character", ["@", "/", "?"])
def test_a_password_that_is_not_percent_encoded_is_refused(character: str) -> None:
    with pytest.raises(ConfigurationError, match="percent-encode"):
        parse_url(f"amqp://localhost:1{character}2@h")


noise = st.text("aA01:/?#@,[]%&=+ \t\né", max_size=6)
tails = st.text("h0:/?#@,[]%&=. ", max_size=12)


@given(before=noise, after=noise, scheme=st.sampled_from(["amqp", "amqps", "http", ""]), tail=tails)
def test_no_error_shows_any_part_of_a_password(before: str, after: str, scheme: str, tail: str) -> None:
    url = f"{scheme}://user:{before}{CANARY}{after}@{tail}"
    for given_url in (url, [url, "amqp://u:p@h"], ["amqp://u:p@h", url]):
        assert CANARY not in said_about(given_url)


def said_about(url: str | list[str]) -> str:
    """Return the text of the parse result: the error or the settings."""
    try:
        settings = parse_url(url)
    except ConfigurationError as error:
        return f"{error} {error.__cause__}"
    return f"{settings!r} {settings}"


@given(
    st.text(max_size=40), st.sampled_from(["", "amqp://", "amqps://u:p@h", "amqp://u:p@h/?", "amqp://u:p@h?heartbeat="])
)
def test_any_text_is_parsed_or_refused(text: str, prefix: str) -> None:
    try:
        settings = parse_url(prefix + text)
    except ConfigurationError:
        return
    assert settings.endpoints
    assert settings.virtual_host


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:secret@h:5432/x", "postgresql+psycopg://u:***@h:5432/x"),
        ("postgresql://u@h/x", "postgresql://u@h/x"),
        ("postgresql://h/x?password=secret&sslmode=require", "postgresql://h/x?password=***&sslmode=require"),
        ("postgresql:///x?host=%2Frun%2Fpg&host=h:1", "postgresql:///x?host=%2Frun%2Fpg&host=h:1"),
        ("postgresql://h/x?host=h;password=secret", "postgresql://h/x?host=***"),
        ("postgresql://h/x?secret", "postgresql://h/x?***"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dsecret", "mssql+pyodbc:///?odbc_connect=***"),
        ("sqlite:////var/lib/orders.db", "sqlite:////var/lib/orders.db"),
        ("redis://:secret@[::1]:6379/0", "redis://:***@[::1]:6379/0"),
        ("amqp://u:secret@h1:5672,h2/v", "amqp://u:***@h1:5672,h2/v"),
        # Malformed: every part that may belong to the password is hidden.
        ("redis://:S3cret/x@h/0", "redis://:***@h/0"),
        ("redis://h/x?password=secret@y", "redis://***@y"),
        ("postgresql://u:se@cr?et@h/x", "postgresql://u:***@h/x"),
        ("postgresql://u:secret/x", "postgresql://u:***"),
        ("postgresql://h1:1,u:secret/x", "postgresql://h1:1,u:***"),
        ("u:secret@h/x", "u:***@h/x"),
        ("/var/lib/orders.db", "/var/lib/orders.db"),
    ],
)
def test_a_redacted_url_says_where_it_leads_without_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown


@given(before=noise, after=noise, scheme=st.sampled_from(["amqp", "redis", "mysql+pymysql", ""]), tail=tails)
def test_no_part_of_a_password_is_left_in_a_redacted_url(before: str, after: str, scheme: str, tail: str) -> None:
    assert CANARY not in redacted(f"{scheme}://user:{before}{CANARY}{after}@{tail}")
    assert CANARY not in redacted(f"{scheme}://host/{tail}?password={CANARY}{after}")


INPUTS: Final = int(os.environ.get("RELIABLE_MQ_FUZZ_INPUTS", "1000000" if soaking() else "3000"))
ALPHABET: Final = "aA01:/?#@,[]%&=+-. \t\n\u00e9\u2100"


@pytest.mark.timeout(60 + INPUTS // 500)
def test_no_broken_url_is_shown_with_part_of_its_password(report: Callable[[str], None]) -> None:
    """A soak run tries a million URLs, from a random seed."""
    seed = seeds()[0]
    rng = random.Random(seed)

    def some(most: int) -> str:
        return "".join(rng.choices(ALPHABET, k=rng.randint(0, most)))

    parsed = 0
    for _ in range(INPUTS):
        scheme = rng.choice(["amqp", "amqps", "http", ""])
        tail = rng.choice(["h", "h:5672/v", "h1,h2?heartbeat=5", some(12)])
        url = f"{scheme}://user:{some(3)}{CANARY}{some(3)}@{tail}"
        said = said_about(url)
        parsed += said.startswith("ConnectionSettings")
        assert CANARY not in said, (seed, url)
        assert CANARY not in redacted(url), (seed, url)
    report(f"seed {seed}, {INPUTS} URLs, {parsed} of them well-formed")
    assert INPUTS / 100 < parsed < INPUTS / 2
