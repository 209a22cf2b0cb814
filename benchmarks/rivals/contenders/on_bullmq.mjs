// /// script
// dependencies = ["bullmq@6.7.0", "ioredis@5.11.1"]
// [tool.rivals]
// title = "BullMQ"
// ///
// BullMQ, on Node. The protocol is described in driver.py.
import { createRequire } from "node:module";
import { openSync, writeSync, constants } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const require = createRequire(process.env.RIVALS_MODULES + "/");
const { Queue, Worker } = require("bullmq");

const CONCURRENCY = 100, CALLERS = 100, BULK = 1000;
const TAIL = "x7Qm".repeat(22);
const NAME = "rivals";
const { hostname, port } = new URL(process.env.RIVALS_URL ?? "redis://127.0.0.1:6379/0");
const connection = { host: hostname, port: Number(port) };
const now = () => Number(process.hrtime.bigint()) / 1e9;
const reply = (value) => process.stdout.write(JSON.stringify(value) + "\n");

function describe() {
  const versions = { node: process.versions.node };
  for (const name of ["bullmq", "ioredis"]) versions[name] = require(name + "/package.json").version;
  reply({
    versions,
    worker: [process.execPath, process.argv[1], "work"],
    settings: [
      "a Worker with `concurrency: 100`, one process; else the defaults",
      "completed jobs are kept for ever (default)",
    ],
    every: 100,
    redelivers: true,
  });
}

function work() {
  const every = Number(process.env.RIVALS_EVERY);
  const flags = constants.O_WRONLY | constants.O_APPEND;
  const tally = openSync(process.env.RIVALS_TALLY, flags);
  const events = openSync(process.env.RIVALS_EVENTS, flags);
  let count = 0;
  const handlers = {
    noop() {
      if (++count % every) return;
      const stamp = Buffer.alloc(8);
      stamp.writeDoubleLE(now());
      writeSync(tally, stamp);
    },
    ping({ argument }) {
      const told = { worker: process.env.RIVALS_WORKER, ms: (now() - Number(argument)) * 1000 };
      writeSync(events, JSON.stringify(told) + "\n");
    },
    async hold({ argument }) {
      writeSync(openSync(argument, constants.O_WRONLY), `began ${now()}\n`);
      await sleep(3600_000);
    },
  };
  new Worker(NAME, async (job) => handlers[job.name](job.data), { connection, concurrency: CONCURRENCY });
}

async function enqueue(queue, how, seconds, most) {
  const began = now(), ends = began + seconds;
  let number = 0, sent = 0;
  const next = () => (number < most && now() < ends ? String(number++).padStart(12, "0") + TAIL : null);
  const loop = async () => {
    for (let each; (each = next()) !== null; sent++) await queue.add("noop", { argument: each });
  };
  if (how === "one") await loop();
  else if (how === "callers") await Promise.all(Array.from({ length: CALLERS }, loop));
  else {
    for (;;) {
      const many = [];
      for (let each; many.length < BULK && (each = next()) !== null; ) many.push({ name: "noop", data: { argument: each } });
      if (!many.length) break;
      await queue.addBulk(many);
      sent += many.length;
    }
  }
  reply({ tasks: sent, seconds: now() - began });
}

async function produce() {
  const queue = new Queue(NAME, { connection });
  for await (const line of createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    if (command.do === "enqueue") await enqueue(queue, command.how, command.seconds, command.most);
    else if (command.do === "ping") {
      await queue.add("ping", { argument: String(now()) });
      reply({});
    } else if (command.do === "hold") {
      await queue.add("hold", { argument: command.path });
      reply({});
    } else if (command.do === "offers") reply({ bulk: true, cancel: false });
  }
  process.exit(0);
}

({ describe, work, produce })[process.argv[2]]();
