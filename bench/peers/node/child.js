// The process of a contender written for Node: node child.js <contender> <dsn> <step as JSON>.
// The other half of the conversation described in ../child.go.
import process from "node:process";
import readline from "node:readline";
import { newTally } from "./tally.js";

const [, , name, dsn, stepText] = process.argv;
const step = JSON.parse(stepText);
const { connect } = await import(`./${name}.js`);
const contender = await connect(dsn, step);

const verbs = {
  push: () => contender.bulkPush(step.entries, step.group_size ?? 0),
  single: () => contender.singlePush(step.conns, step.entries),
  drain: (tally) => {
    tally.expect(step.entries);
    return contender.drain(tally, step.group_size ?? 0);
  },
  sustained: (tally) => contender.sustained(step.seconds, tally),
  pickup: () => contender.pickupLatency(step.entries, step.settings ?? ""),
  left: () => contender.left(),
};

const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
await say({ ready: true });
await lines.next();

const before = process.cpuUsage();
const told = step.shared ? lines.next() : null;
const tally = newTally(step.shared ?? false, told, (line) => process.stdout.write(line + "\n"));
const work = await verbs[step.verb](tally);
tally.close();
const cpu = process.cpuUsage(before);
await say({
  ...work,
  client_cpu_seconds: (cpu.user + cpu.system) / 1e6,
  client_rss_bytes: process.resourceUsage().maxRSS * 1024,
});
await contender.close();
process.exit(0);

// Resolves when the line is out: exit would cut off what a full pipe has not taken yet.
function say(message) {
  return new Promise((resolve) => process.stdout.write(JSON.stringify(message) + "\n", resolve));
}
