// graphile-worker through its documented fast path: local queue and batched completion.
// Finished rows are deleted, as graphile-worker does. Groups are its named queues.
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { actAsPusherThread, bulk, groupOf, payloadOf, pickups, pusherThread, seconds, single } from "./load.js";

// After https://worker.graphile.org/docs/performance, which has a local queue of 500 and a delay of 0;
// these took a little less CPU here.
const fast = {
  concurrentJobs: 24,
  localQueue: { size: 1000 },
  completeJobBatchDelay: 2,
  failJobBatchDelay: 2,
};

// With named queues a fetch takes at most one job of each and then waits out pollInterval, even where more could be had:
// at the default of 2 s groups run a hundred times slower, and without a local queue thirty times.
const fastGroups = { ...fast, completeJobBatchDelay: 0, pollInterval: 1 };

const silent = new Logger(() => () => {});

// The task of a pick-up notes the arrival in this process, or has it noted by a worker that it calls (graphile-call.js).
export async function connect(dsn, step, worker) {
  const pool = new pg.Pool({ connectionString: dsn, max: 25 });
  const fail = (error) => console.error(error);
  pool.on("error", fail).on("connect", (client) => client.on("error", fail)); // graphile-worker asks for both
  const utils = await makeWorkerUtils({ pgPool: pool, logger: silent });
  await utils.migrate();
  const payload = payloadOf(step);
  const work = (worker, bench) =>
    run({ pgPool: pool, logger: silent, noHandleSignals: true, taskList: { bench }, preset: { worker } });

  const pushSpecs = (first, last, specOf) => {
    const specs = [];
    for (let i = first; i < last; i++) specs.push(specOf(i));
    return utils.addJobs(specs);
  };
  const solo = (i) => ({ identifier: "bench", payload: payload(i) });

  return {
    pushBatch: (first, last) => pushSpecs(first, last, solo),

    bulkPush(n, groupSize) {
      const grouped = (i) => ({ ...solo(i), queueName: groupOf(i, n, groupSize) });
      return bulk(n, (first, last) => pushSpecs(first, last, groupSize > 1 ? grouped : solo));
    },

    singlePush: (conns, n) => single(conns, n, (i) => utils.addJob("bench", payload(i))),

    async drain(tally, groupSize) {
      const start = performance.now();
      const runner = await work(groupSize > 1 ? fastGroups : fast, () => tally.add(1));
      await tally.over;
      await runner.stop(); // flushes the completions
      return { entries: tally.handled, seconds: seconds(start) };
    },

    async sustained(durationSeconds, tally) {
      const pusher = pusherThread("./graphile.js", dsn, step, durationSeconds);
      const start = performance.now();
      const runner = await work(fast, () => {
        tally.add(1);
        pusher.handled(1);
      });
      tally.expect(await pusher.pushed);
      await tally.over;
      await runner.stop();
      return { entries: tally.handled, seconds: seconds(start) };
    },

    async pickupLatency(n, settings) {
      if (settings === "hints_off") return { unsupported: true }; // it always listens
      const p = pickups(n, 15, worker?.arrivals);
      const task = worker ? (body) => worker.call(body) : (body) => p.handle(body.n);
      const runner = await work(settings === "tuned" ? { concurrentJobs: 24 } : {}, task);
      const result = await p.run((i) => utils.addJob("bench", payload(i)));
      await runner.stop();
      return result;
    },

    async left() {
      const { rows } = await pool.query("SELECT count(*)::int AS n FROM graphile_worker._private_jobs");
      return { entries: rows[0].n };
    },

    async close() {
      await utils.release();
      await pool.end();
    },
  };
}

await actAsPusherThread(connect);
