// The loads that every Node contender drives in the same way; the counterpart of ../load.go.
import { setTimeout as sleep } from "node:timers/promises";
import { Worker, isMainThread, workerData } from "node:worker_threads";

export const batchSize = 1000;
const pushers = 2;
const sustainedBacklogMax = 20 * batchSize;

export const seconds = (start) => (performance.now() - start) / 1000;

export function payloadOf(step) {
  const pad = "x".repeat(Math.max(0, step.payload_bytes - '{"n":10000,"pad":""}'.length));
  return (n) => ({ n, pad });
}

export const groupOf = (i, n, groupSize) => `g${i % Math.max(1, Math.floor(n / groupSize))}`;

// bulk pushes n entries in batches; push writes entries first up to (not including) last.
export async function bulk(n, push) {
  const start = performance.now();
  let next = 0;
  const pusher = async () => {
    while (next < n) {
      const first = next;
      next += batchSize;
      await push(first, Math.min(first + batchSize, n));
    }
  };
  await Promise.all(Array.from({ length: pushers }, pusher));
  return { entries: n, seconds: seconds(start) };
}

// single pushes n entries one by one, conns calls at a time, and keeps the time of each call.
export async function single(conns, n, push) {
  const micros = new Array(n);
  const start = performance.now();
  let next = 0;
  const pusher = async () => {
    while (next < n) {
      const i = next++;
      const began = performance.now();
      await push(i);
      micros[i] = Math.round((performance.now() - began) * 1000);
    }
  };
  await Promise.all(Array.from({ length: conns }, pusher));
  return { entries: n, seconds: seconds(start), latency_us: micros };
}

// Milliseconds of CLOCK_MONOTONIC, the same in every process of the machine.
const now = () => Number(process.hrtime.bigint()) / 1e6;

// pickups records when entries were pushed and when their handlers started;
// between two pushes it waits a third to five thirds of meanMillis.
// arrivals, if given, returns the times at which a worker was called, where handlers do not run in this process.
export function pickups(n, meanMillis = 15, arrivals) {
  let started = new Array(n);
  const called = new Array(n);
  const returned = new Array(n);
  let left = n;
  const done = Promise.withResolvers();
  return {
    handle(i) {
      started[i] = now();
      if (--left === 0) done.resolve();
    },
    async run(push) {
      const begin = performance.now();
      for (let i = 0; i < n; i++) {
        await sleep(meanMillis * (1 / 3 + (4 / 3) * Math.random()));
        called[i] = now();
        await push(i);
        returned[i] = now();
      }
      if (arrivals) started = await arrivals();
      else await done.promise;
      return {
        entries: n,
        seconds: seconds(begin),
        latency_us: started.map((at, i) => Math.round(Math.max(0, at - returned[i]) * 1000)),
        from_push_us: started.map((at, i) => Math.round((at - called[i]) * 1000)),
      };
    },
  };
}

// A pusher in a thread of its own, so that pushing does not take the workers' event loop.
// It never runs more than sustainedBacklogMax ahead of what handled() was told.
export function pusherThread(script, dsn, step, durationSeconds) {
  const shared = new Int32Array(new SharedArrayBuffer(4));
  const thread = new Worker(new URL(script, import.meta.url), { workerData: { dsn, step, shared, durationSeconds } });
  const pushed = new Promise((resolve, reject) => {
    thread.once("message", resolve);
    thread.once("error", reject);
  });
  return { pushed, handled: (count) => Atomics.add(shared, 0, count) };
}

// Run at the end of each contender's file: does the pushing when the file was started as such a thread.
export async function actAsPusherThread(connect) {
  if (isMainThread) return;
  const { parentPort } = await import("node:worker_threads");
  const { dsn, step, shared, durationSeconds } = workerData;
  const contender = await connect(dsn, step);
  const end = performance.now() + durationSeconds * 1000;
  let pushed = 0;
  while (performance.now() < end) {
    if (pushed - Atomics.load(shared, 0) > sustainedBacklogMax - batchSize) {
      await sleep(1);
      continue;
    }
    await contender.pushBatch(pushed, pushed + batchSize);
    pushed += batchSize;
  }
  await contender.close();
  parentPort.postMessage(pushed);
}
