// Does what it is told with Node's fetch; the protocol is that of ../driver.rs.

import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

async function one(order, request) {
  const body = request.body + " ".repeat(request.padding);
  try {
    const answer = await fetch(order.base + request.path, {
      method: request.method,
      body: body === "" ? undefined : body,
      headers: request.headers,
      signal: AbortSignal.timeout(60_000),
    });
    await answer.arrayBuffer();
    const closes = (answer.headers.get("connection") ?? "").toLowerCase() === "close";
    return `${answer.status}${closes ? " close" : ""}`;
  } catch (error) {
    return `error ${error.cause?.code ?? error.cause?.message ?? error.message}`;
  }
}

function group(order) {
  const state = { stopped: false, statuses: {} };
  const run = async () => {
    for (let round = 0; !state.stopped && (!order.calls || round < order.calls); round++) {
      for (const request of order.requests) {
        let result = await one(order, request);
        while (result.startsWith("503") && order.again) {
          await sleep(10);
          result = await one(order, request);
        }
        state.statuses[result] = (state.statuses[result] ?? 0) + 1;
        if (order.pause_ms) await sleep(order.pause_ms);
      }
    }
  };
  state.ended = Promise.all(Array.from({ length: order.callers }, run));
  return state;
}

const groups = new Map();
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  let answer = {};
  if (order.do === "start") {
    groups.set(order.id, group(order));
  } else if (order.do === "stop") {
    groups.get(order.id).stopped = true;
  } else if (order.do === "wait") {
    const state = groups.get(order.id);
    await state.ended;
    answer = { statuses: state.statuses };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit(0);
