"""Keep-alive clients of the HTTP port: requests and http.client, against refusals.

Usage: http_clients.py refusals|overload HOST:PORT
"""

import http.client
import sys
import time

import requests

JSON = b'{"namespace":"shop","bucketName":"b"}'


def refusals(address):
    # Each refusal is followed by a request on the same session.
    with requests.Session() as session:
        for path, body, expected in [
            ("/nothing", JSON, 404),
            ("/metrics", JSON, 405),
            ("/v1/allow", b" " * (3 << 20), 413),
            ("/nothing", b" " * (3 << 20), 404),
        ] * 5:
            answer = session.post(f"http://{address}{path}", data=body, timeout=20)
            assert answer.status_code == expected, (path, answer.status_code)
            assert "error" in answer.json(), answer.text
            answer = session.post(f"http://{address}/v1/allow", data=JSON, timeout=20)
            assert answer.status_code == 200, answer.text
    # http.client does not try again by itself.
    connection = http.client.HTTPConnection(address, timeout=20)
    for path, expected in [("/nothing", 404), ("/metrics", 405), ("/v1/allow", 200)] * 20:
        connection.request("POST", path, body=JSON)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == expected, (path, answer.status)
        assert not answer.will_close, path
    for path, expected in [("/v1/allow", 413), ("/nothing", 404)] * 5:
        connection.request("POST", path, body=b" " * (3 << 20))
        answer = connection.getresponse()
        answer.read()
        assert answer.status == expected, (path, answer.status)


def overload(address):
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.connect()
    for _ in range(10):
        # Headers first, and the body a little later.
        connection.putrequest("POST", "/v1/allow")
        connection.putheader("Content-Length", str(len(JSON)))
        connection.endheaders()
        time.sleep(0.1)
        connection.send(JSON)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 503, answer.status
        assert not answer.will_close


{"refusals": refusals, "overload": overload}[sys.argv[1]](sys.argv[2])
