// pg-boss through its documented batch calls: insert, fetch and complete with arrays.
// Finished rows are kept (state completed), as pg-boss does. Groups are a queue with policy key_strict_fifo.
import { PgBoss } from "pg-boss";
import { actAsPusherThread, bulk, groupOf, payloadOf, pickups, pusherThread, seconds, single } from "./load.js";

const fetchSize = 1000;
const fetchers = { solo: 3, groups: 2 };

export async function connect(dsn, step) {
  const tuned = step.settings === "tuned";
  const boss = new PgBoss({
    connectionString: dsn,
    max: 20,
    schedule: false,
    supervise: false,
    useListenNotify: tuned,
  });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  await boss.createQueue("solo", { partition: true, notify: tuned });
  await boss.createQueue("groups", { partition: true, policy: "key_strict_fifo" });
  const payload = payloadOf(step);

  const pushJobs = (queue, first, last, jobOf) => {
    const jobs = [];
    for (let i = first; i < last; i++) jobs.push(jobOf(i));
    return boss.insert(queue, jobs);
  };
  const solo = (i) => ({ data: payload(i) });

  // Fetches and completes until stop says so; handled is told the size of each batch.
  const work = (queue, handled, stop) => {
    const fetcher = async () => {
      while (!stop()) {
        const jobs = await boss.fetch(queue, { batchSize: fetchSize });
        if (jobs.length === 0) {
          await new Promise((resolve) => setTimeout(resolve, 1));
          continue;
        }
        await boss.complete(queue, jobs.map((job) => job.id));
        handled(jobs.length);
      }
    };
    return Promise.all(Array.from({ length: fetchers[queue] }, fetcher));
  };

  return {
    pushBatch: (first, last) => pushJobs("solo", first, last, solo),

    bulkPush(n, groupSize) {
      const grouped = (i) => ({ ...solo(i), singletonKey: groupOf(i, n, groupSize) });
      if (groupSize > 1) return bulk(n, (first, last) => pushJobs("groups", first, last, grouped));
      return bulk(n, (first, last) => pushJobs("solo", first, last, solo));
    },

    singlePush: (conns, n) => single(conns, n, (i) => boss.send("solo", payload(i))),

    async drain(tally, groupSize) {
      const start = performance.now();
      await work(groupSize > 1 ? "groups" : "solo", tally.add, () => tally.isOver);
      return { entries: tally.handled, seconds: seconds(start) };
    },

    async sustained(durationSeconds, tally) {
      const pusher = pusherThread("./pgboss.js", dsn, step, durationSeconds);
      const start = performance.now();
      pusher.pushed.then(tally.expect);
      const count = (n) => {
        tally.add(n);
        pusher.handled(n);
      };
      await work("solo", count, () => tally.isOver);
      return { entries: tally.handled, seconds: seconds(start) };
    },

    async pickupLatency(n) {
      // Without hints, which is its default, pg-boss polls every 2 s for one job: pushing faster would measure a growing backlog.
      const p = tuned ? pickups(n) : pickups(Math.min(n, 6), 3000);
      const options = tuned ? { localConcurrency: 4, pollingIntervalSeconds: 0.5 } : {};
      await boss.work("solo", options, async (jobs) => jobs.forEach((job) => p.handle(job.data.n)));
      return p.run((i) => boss.send("solo", payload(i)));
    },

    async left() {
      const { rows } = await boss.getDb().executeSql("SELECT count(*)::int AS n FROM pgboss.job WHERE state < 'completed'");
      return { entries: rows[0].n };
    },

    close: () => boss.stop({ graceful: true, timeout: 5000 }),
  };
}

await actAsPusherThread(connect);
