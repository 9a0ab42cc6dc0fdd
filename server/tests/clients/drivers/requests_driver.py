"""Does what it is told with Python's `requests`; the protocol is that of ../driver.rs."""

import collections
import json
import sys
import threading
import time

import requests


def cause(error):
    """The innermost error, which says what the connection met."""
    while True:
        inner = [each for each in error.args if isinstance(each, BaseException)]
        inner += [each for each in [getattr(error, "reason", None)] if isinstance(each, BaseException)]
        if not inner:
            return type(error).__name__
        error = inner[0]


class Group:
    """Callers that do the same, each with a session of its own."""

    def __init__(self, sessions, order):
        self.order = order
        self.lock = threading.Lock()
        self.statuses = collections.Counter()
        self.stopped = threading.Event()
        self.threads = [
            threading.Thread(target=self.run, args=(sessions[number],))
            for number in range(order["callers"])
        ]
        for thread in self.threads:
            thread.start()

    def run(self, session):
        rounds = 0
        while not self.stopped.is_set() and (not self.order["calls"] or rounds < self.order["calls"]):
            rounds += 1
            for request in self.order["requests"]:
                result = self.one(session, request)
                while result.startswith("503") and self.order["again"]:
                    time.sleep(0.01)
                    result = self.one(session, request)
                with self.lock:
                    self.statuses[result] += 1
                time.sleep(self.order["pause_ms"] / 1000)

    def one(self, session, request):
        body = request["body"].encode() + b" " * request["padding"]
        try:
            answer = session.request(
                request["method"],
                self.order["base"] + request["path"],
                data=body or None,
                headers=request["headers"],
                timeout=60,
            )
        except requests.RequestException as error:
            return "error " + cause(error)
        closes = answer.headers.get("connection", "").lower() == "close"
        return f"{answer.status_code}{' close' if closes else ''}"

    def wait(self):
        for thread in self.threads:
            thread.join()
        return {"statuses": self.statuses}


def main():
    sessions = collections.defaultdict(requests.Session)
    groups = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer = {}
        if order["do"] == "start":
            mine = {n: sessions[(order["sessions"], n)] for n in range(order["callers"])}
            for session in mine.values():
                session.trust_env = False
            groups[order["id"]] = Group(mine, order)
        elif order["do"] == "stop":
            groups[order["id"]].stopped.set()
        elif order["do"] == "wait":
            answer = groups.pop(order["id"]).wait()
        print(json.dumps(answer), flush=True)


main()
