// Does what it is told with grpc-js; the protocol is that of ../../driver.rs.

import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import * as grpc from "@grpc/grpc-js";

const COMPRESSION = { "": 0, deflate: 1, gzip: 2 };
const same = (message) => message;

function opened(order) {
  const options = { "grpc.default_compression_algorithm": COMPRESSION[order.compression] };
  if (order.authority !== null) options["grpc.default_authority"] = order.authority;
  if (order.keepalive_ms) {
    options["grpc.keepalive_time_ms"] = order.keepalive_ms;
    options["grpc.keepalive_timeout_ms"] = 5000;
    options["grpc.keepalive_permit_without_calls"] = 1;
  }
  if (order.round_robin) {
    options["grpc.service_config"] = '{"loadBalancingConfig":[{"round_robin":{}}]}';
  }
  options["grpc.use_local_subchannel_pool"] = 1;
  const target = `ipv4:${order.addresses.join(",")}`;
  return new grpc.Client(target, grpc.credentials.createInsecure(), options);
}

function one(client, order) {
  return new Promise((resolve) => {
    const metadata = new grpc.Metadata();
    if (order.metadata) metadata.set("x-more", "x".repeat(order.metadata));
    const options = { deadline: Date.now() + order.deadline_ms };
    const done = (error) => {
      if (!error) return resolve(["OK", ""]);
      resolve([grpc.status[error.code], error.details]);
    };
    const message = Buffer.from(order.request, "hex");
    let call;
    if (order.messages === 1) {
      call = client.makeUnaryRequest(order.path, same, same, message, metadata, options, done);
    } else {
      call = client.makeClientStreamRequest(order.path, same, same, metadata, options, done);
      for (let sent = 0; sent < order.messages; sent++) call.write(message);
      call.end();
    }
    if (order.cancel_ms) setTimeout(() => call.cancel(), order.cancel_ms);
  });
}

function group(client, order) {
  const state = { stopped: false, statuses: {}, texts: {} };
  const run = async () => {
    for (let calls = 0; !state.stopped && (!order.calls || calls < order.calls); ) {
      const [status, text] = await one(client, order);
      if (status === "RESOURCE_EXHAUSTED" && order.again) {
        await sleep(10);
        continue;
      }
      calls++;
      state.statuses[status] = (state.statuses[status] ?? 0) + 1;
      state.texts[status] = text;
    }
  };
  state.ended = Promise.all(Array.from({ length: order.callers }, run));
  return state;
}

// Sends requests, keeps the stream open, reads answers, and tells whether it then ends.
function stream(client, order) {
  return new Promise((resolve) => {
    const options = { deadline: Date.now() + 60_000 };
    const call = client.makeBidiStreamRequest(order.path, same, same, new grpc.Metadata(), options);
    const answers = [];
    let told = false;
    const tell = (status) => {
      if (told) return;
      told = true;
      resolve({ answers, status });
      call.cancel();
    };
    const limit = setTimeout(() => tell(null), 20_000);
    limit.unref();
    call.on("data", (answer) => {
      answers.push(answer.toString("hex"));
      if (answers.length === order.answers) setTimeout(() => tell(null), order.hold_ms);
    });
    call.on("error", () => {});
    call.on("status", (status) => tell(grpc.status[status.code]));
    for (const request of order.requests) call.write(Buffer.from(request, "hex"));
  });
}

const clients = new Map();
const groups = new Map();
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  let answer = {};
  if (order.do === "open") {
    clients.set(order.channel, opened(order));
  } else if (order.do === "start") {
    groups.set(order.id, group(clients.get(order.channel), order));
  } else if (order.do === "stop") {
    groups.get(order.id).stopped = true;
  } else if (order.do === "wait") {
    const state = groups.get(order.id);
    await state.ended;
    answer = { statuses: state.statuses, texts: state.texts };
  } else if (order.do === "stream") {
    answer = await stream(clients.get(order.channel), order);
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit(0);
