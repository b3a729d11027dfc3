"""A client that offers another protocol, as Java's does, is answered in the one it uses."""

from __future__ import annotations

import json
from http.client import HTTPResponse

from tests.dialects.test_fields import LEAST
from tests.endpoint.serving import client_in_rollout, serve
from tests.endpoint.test_hanging_up import connect

CHAT = "/chat/completions"


def test_a_request_that_offers_another_protocol_keeps_its_body():
    with serve() as endpoint, client_in_rollout(endpoint) as (_, client):
        content = json.dumps(LEAST[CHAT] | {"user": "\r\n\r\nupgrade: x"}).encode()
        head = (
            f"POST /v1{CHAT} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(content)}\r\nHost: x\r\n"
            f"HTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\nAuthorization: {client.headers['authorization']}\r\n\r\n"
        ).encode()
        with connect(endpoint) as connection:
            for parts in ([head + content], [head, content]):
                for part in parts:
                    connection.sendall(part)
                answer = HTTPResponse(connection)
                answer.begin()
                assert answer.status == 200, answer.read()
                answer.read()
