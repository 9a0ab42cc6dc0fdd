// Keep-alive clients of the HTTP port: Node's http agent with 100 sockets, and fetch.
// Usage: http_clients.mjs refusals|overload HOST:PORT
import http from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';

const [mode, address] = process.argv.slice(2);
const [hostname, port] = address.split(':');
const JSON_BODY = '{"namespace":"shop","bucketName":"b"}';
const agent = new http.Agent({ keepAlive: true, maxSockets: 100 });

// One request; `late`: the body follows 0.1 s after the headers. Fails on any socket error.
function post(path, body, late) {
  return new Promise((resolve, reject) => {
    const headers = { 'content-length': body.length };
    const request = http.request({ agent, hostname, port, path, method: 'POST', headers });
    request.on('response', (answer) => {
      answer.resume();
      answer.on('end', () => resolve(answer.statusCode));
      answer.on('error', reject);
    });
    request.on('error', reject);
    request.flushHeaders();
    if (late) sleep(100).then(() => request.end(body));
    else request.end(body);
  });
}

async function all(count, ask, expected) {
  const failed = {};
  const caller = async () => {
    for (let n = 0; n < count; n++) {
      const status = await ask().catch((error) => error.cause?.code ?? error.code ?? String(error));
      if (status !== expected) failed[status] = (failed[status] ?? 0) + 1;
    }
  };
  await Promise.all(Array.from({ length: 100 }, caller));
  if (Object.keys(failed).length) throw new Error(`not ${expected}: ${JSON.stringify(failed)}`);
}

const fetched = async (path) => {
  const answer = await fetch(`http://${address}${path}`, { method: 'POST', body: JSON_BODY });
  await answer.text();
  return answer.status;
};

if (mode === 'refusals') {
  await all(6, () => post('/nothing', JSON_BODY, false), 404);
  await all(2, () => post('/nothing', JSON_BODY, true), 404);
  await all(4, () => fetched('/metrics'), 405);
} else {
  await all(6, () => post('/v1/allow', JSON_BODY, false), 503);
  await all(2, () => post('/v1/allow', JSON_BODY, true), 503);
  await all(4, () => fetched('/v1/allow'), 503);
}
agent.destroy();
