"""Only a browser with the token sees the pages, and only the folder of runs."""

from __future__ import annotations

from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from lightning_core.errors import ConfigError
from lightning_core.tools.view.server import open_view
from tests.tools.view.made_runs import make_run, rollout
from tests.tools.view.served import PORT, TOKEN, stranger, visitor

PAGES = [
    "/",
    "/runs/one",
    "/runs/one/ledger",
    "/compare?run=one&run=two",
    "/static/style.css",
    "/static/vendor/uPlot.iife.min.js",
]
MISSING = ["/runs/none", "/runs/none/events", "/runs/none/ledger", "/compare?run=none", "/static/none.js", "/none"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        make_run(runs / name, metrics=[{"reward": 0.5}], rollouts=[rollout(1)])
    return runs


@pytest.mark.parametrize("path", [*PAGES, *MISSING, "/?token=wrong", "/?token="])
def test_without_the_token_nothing_is_shown(folder: Path, path: str) -> None:
    response = stranger(folder).get(path)
    assert response.status_code == 403
    assert response.text == "No valid token. Open the URL that lightning-rl view printed, with its ?token=… part."


def test_the_token_becomes_a_cookie_and_leaves_the_url(folder: Path) -> None:
    client = stranger(folder)
    response = client.get(f"/compare?run=one&token={TOKEN}&run=two")
    assert (response.status_code, response.headers["location"]) == (303, "/compare?run=one&run=two")
    cookie = response.headers["set-cookie"]
    assert f"lightning-view-{PORT}={TOKEN}" in cookie
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("//evil.example/x", "/evil.example/x"),
        ("///evil.example", "/evil.example"),
        ("/runs/100%25", "/runs/100%25"),
        ("/runs/a%2Fb%3Fc", "/runs/a%2Fb%3Fc"),
    ],
)
def test_a_token_leads_to_the_same_path_on_this_server(folder: Path, path: str, location: str) -> None:
    with open_view(folder, token=TOKEN) as url:
        connection = HTTPConnection(url.removeprefix("http://").partition("/")[0])
        connection.request("GET", f"{path}?token={TOKEN}")
        response = connection.getresponse()
        assert (response.status, response.getheader("location")) == (303, location)
        connection.close()


def test_a_token_from_another_place_opens_a_page_that_opens_the_next(folder: Path) -> None:
    """A browser would not send the strict cookie with a redirect."""
    client = stranger(folder)
    response = client.get(f"/runs/one?token={TOKEN}", headers={"Sec-Fetch-Site": "cross-site"})
    assert (response.status_code, response.headers["refresh"]) == (200, "0; url=/runs/one")
    assert "content-security-policy" in response.headers
    assert client.get("/runs/one").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1.evil.example:{PORT}", ""]
)
def test_a_page_under_another_name_cannot_read_ours(folder: Path, host: str) -> None:
    response = visitor(folder).get("/", headers={"Host": host})
    assert response.status_code == 400
    assert "/runs/one" not in response.text


def test_the_name_localhost_is_ours_too(folder: Path) -> None:
    assert visitor(folder).get("/", headers={"Host": f"localhost:{PORT}"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/runs/one", "/static/style.css"])
def test_only_reading_is_allowed(folder: Path, method: str, path: str) -> None:
    response = visitor(folder).request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", [*PAGES, *MISSING])
def test_every_response_forbids_foreign_scripts(folder: Path, path: str) -> None:
    client = visitor(folder)
    responses = [client.get(path), client.head(path), client.post(path), stranger(folder).get(path)]
    responses.append(client.get(path, headers={"Host": "evil.example"}))
    for response in responses:
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"


def test_an_internal_error_has_the_headers_too_and_no_details(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    client = visitor(folder)
    monkeypatch.setattr(client.app.state.library, "runs", fail)  # type: ignore[attr-defined]
    response = client.get("/")
    assert response.status_code == 500
    assert "content-security-policy" in response.headers
    assert "secret detail" not in response.text


ESCAPES = [
    "/runs/..",
    "/runs/../../secret",
    "/runs/%2e%2e",
    "/runs/%2e%2e%2fsecret",
    "/runs/..%2f..%2fetc%2fpasswd",
    "/runs/%2fetc",
    "/runs/secret",
    "/runs/link",
    "/runs/one%2f..%2f..%2fsecret",
    "/runs/one%00",
    "/runs/.",
    "/compare?run=../secret",
    "/compare?run=/etc",
    "/static/../app.py",
    "/static/%2e%2e/app.py",
    "/static/..%2fapp.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
]


def get_unchanged(folder: Path, path: str) -> tuple[int, str]:
    """Status and body of ``path``, which other clients would simplify before they send it."""
    with open_view(folder, token=TOKEN) as url:
        host = url.removeprefix("http://").partition("/")[0]
        connection = HTTPConnection(host)
        connection.request("GET", path, headers={"Cookie": f"lightning-view-{host.partition(':')[2]}={TOKEN}"})
        response = connection.getresponse()
        status, text = response.status, response.read().decode()
        connection.close()
        return status, text


def test_paths_arrive_unchanged(folder: Path) -> None:
    status, text = get_unchanged(folder, "/runs/one")
    assert (status, "tiny" in text) == (200, True)


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_out_of_the_folder(folder: Path, path: str) -> None:
    secret = make_run(folder.parent / "secret", config={"policy": {"model": "secret-model"}})
    (folder / "link").symlink_to(secret)
    status, text = get_unchanged(folder, path)
    assert status == 404
    assert "secret-model" not in text
    assert "root:" not in text
    assert "create_app" not in text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "commit.txt", "store.db"])
def test_a_file_that_links_out_of_the_folder_hides_its_run(folder: Path, name: str) -> None:
    secret = make_run(folder.parent / "secret", config={"policy": {"model": "secret-model"}}, rollouts=[rollout(1)])
    (secret / "commit.txt").write_text("secret-model")
    inside = make_run(folder / "third")
    (inside / name).unlink(missing_ok=True)
    (inside / name).symlink_to(secret / name)
    client = visitor(folder)
    listed = client.get("/").text
    assert f"third/{name}" in listed, "the list says what it leaves out"
    assert 'href="/runs/third"' not in listed
    for path in ("/runs/third", "/runs/third/ledger", "/compare?run=one&run=third"):
        response = client.get(path)
        assert response.status_code == 404
        assert f"third/{name} is a link out of" in response.text
        assert "secret-model" not in response.text


def test_a_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "shared.db").write_bytes((folder / "one" / "store.db").read_bytes())
    (folder / "two" / "store.db").unlink()
    (folder / "two" / "store.db").symlink_to("../shared.db")
    assert visitor(folder).get("/runs/two/ledger").status_code == 200


def test_the_server_is_on_this_machine_with_a_new_token_each_time(folder: Path) -> None:
    with open_view(folder) as url, open_view(folder) as other:
        assert url.startswith("http://127.0.0.1:")
        assert url.partition("token=")[2] != other.partition("token=")[2]
        assert httpx.get(url.partition("?")[0]).status_code == 403
        with httpx.Client(follow_redirects=True) as client:
            response = client.get(url)
            assert (response.status_code, response.url.query) == (200, b"")
            assert "content-security-policy" in response.headers
            assert client.post(url).status_code == 405
            assert client.get(f"{url.partition('/?')[0]}/runs/one").status_code == 200


def test_a_taken_port_and_a_missing_folder_are_errors(folder: Path) -> None:
    with open_view(folder) as url:
        port = int(url.split(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be used"), open_view(folder, port=port):
            pass
    with pytest.raises(ConfigError, match="there is no folder"), open_view(folder / "none"):
        pass
