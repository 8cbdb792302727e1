// graphile-worker with a task that calls an inference worker over HTTP, as Penstock's inference queues do: the step
// names the worker, and an entry counts as handled when its call has arrived there. Pick-ups alone.
// Of Node's clients http.request takes the least time for a short call; its agent keeps the connection open.
import http from "node:http";
import { connect as connectPlain } from "./graphile.js";

const agent = new http.Agent({ keepAlive: true });

export async function connect(dsn, step) {
  const contender = await connectPlain(dsn, step, workerAt(step.worker));
  const unsupported = { unsupported: true };
  const none = () => unsupported;
  return { ...contender, bulkPush: none, singlePush: none, drain: none, sustained: none };
}

function workerAt(url) {
  return {
    async call(payload) {
      const body = JSON.stringify(payload);
      const headers = { "Content-Type": "application/json", "Content-Length": Buffer.byteLength(body) };
      const reply = JSON.parse(await exchange(url, { method: "POST", headers }, body));
      if (reply.status !== "success") throw new Error(`worker answered ${reply.status}`);
    },
    async arrivals() {
      const nanoseconds = JSON.parse(await exchange(new URL("/arrivals", url), { method: "GET" }));
      return nanoseconds.map((at) => at / 1e6);
    },
  };
}

// Resolves with the body of an answer of status 200.
function exchange(url, options, body) {
  return new Promise((resolve, reject) => {
    const request = http.request(url, { agent, ...options }, (reply) => {
      const parts = [];
      reply.on("data", (part) => parts.push(part));
      reply.on("error", reject);
      reply.on("end", () => {
        if (reply.statusCode !== 200) reject(new Error(`worker answered ${reply.statusCode}`));
        else resolve(Buffer.concat(parts).toString());
      });
    });
    request.on("error", reject);
    request.end(body);
  });
}
