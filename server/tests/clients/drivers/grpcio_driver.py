"""Does what it is told with Python's gRPC library; the protocol is that of ../driver.rs."""

import collections
import json
import queue
import sys
import threading
import time

import grpc

COMPRESSION = {
    "": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}


def same(message):
    return message


class Group:
    """Callers that do the same, and the count of what came of it."""

    def __init__(self, channel, order):
        self.order = order
        self.lock = threading.Lock()
        self.statuses = collections.Counter()
        self.texts = {}
        self.stopped = threading.Event()
        if order["messages"] == 1:
            self.call = channel.unary_unary(order["path"], same, same)
        else:
            self.call = channel.stream_unary(order["path"], same, same)
        self.threads = [threading.Thread(target=self.run) for _ in range(order["callers"])]
        for thread in self.threads:
            thread.start()

    def run(self):
        calls = 0
        while not self.stopped.is_set() and (not self.order["calls"] or calls < self.order["calls"]):
            status, text = self.one()
            if status == "RESOURCE_EXHAUSTED" and self.order["again"]:
                time.sleep(0.01)
                continue
            calls += 1
            with self.lock:
                self.statuses[status] += 1
                self.texts[status] = text

    def one(self):
        message = bytes.fromhex(self.order["request"])
        if self.order["messages"] != 1:
            message = iter([message] * self.order["messages"])
        metadata = [("x-more", "x" * self.order["metadata"])] if self.order["metadata"] else None
        try:
            future = self.call.future(message, self.order["deadline_ms"] / 1000, metadata)
            if self.order["cancel_ms"]:
                time.sleep(self.order["cancel_ms"] / 1000)
                future.cancel()
            future.result()
            return "OK", ""
        except grpc.RpcError as error:
            return error.code().name, error.details()
        except grpc.FutureCancelledError:
            return "CANCELLED", ""

    def wait(self):
        for thread in self.threads:
            thread.join()
        return {"statuses": self.statuses, "texts": self.texts}


def stream(channel, order):
    """Sends requests, keeps the stream open, reads answers, and tells whether it then ends."""
    to_send = queue.Queue()
    for request in order["requests"]:
        to_send.put(bytes.fromhex(request))
    call = channel.stream_stream(order["path"], same, same)(iter(to_send.get, None), 60)
    answers, ended = [], queue.Queue()

    def read():
        try:
            for answer in call:
                answers.append(answer.hex())
                ended.put(None)
            ended.put("OK")
        except grpc.RpcError as error:
            ended.put(error.code().name)

    threading.Thread(target=read, daemon=True).start()
    status = None
    try:
        while len(answers) < order["answers"] and status is None:
            status = ended.get(timeout=20)
    except queue.Empty:
        pass
    # What is left in the queue is one mark for each answer that was counted already.
    until = time.monotonic() + order["hold_ms"] / 1000
    while status is None and time.monotonic() < until:
        try:
            status = ended.get(timeout=max(0, until - time.monotonic()))
        except queue.Empty:
            pass
    call.cancel()
    to_send.put(None)
    return {"answers": answers, "status": status}


def opened(order):
    options = []
    if order["authority"] is not None:
        options.append(("grpc.default_authority", order["authority"]))
    if order["keepalive_ms"]:
        options += [
            ("grpc.keepalive_time_ms", order["keepalive_ms"]),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if order["round_robin"]:
        options.append(("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'))
    # Without this, all channels of one process to the same addresses share their connections.
    options.append(("grpc.use_local_subchannel_pool", 1))
    target = "ipv4:" + ",".join(order["addresses"])
    return grpc.insecure_channel(target, options, COMPRESSION[order["compression"]])


def main():
    channels, groups = {}, {}
    for line in sys.stdin:
        order = json.loads(line)
        answer = {}
        if order["do"] == "open":
            channels[order["channel"]] = opened(order)
        elif order["do"] == "start":
            groups[order["id"]] = Group(channels[order["channel"]], order)
        elif order["do"] == "stop":
            groups[order["id"]].stopped.set()
        elif order["do"] == "wait":
            answer = groups.pop(order["id"]).wait()
        elif order["do"] == "stream":
            answer = stream(channels[order["channel"]], order)
        print(json.dumps(answer), flush=True)


main()
