// flood.mjs QUEUE TASKS JOBS: puts so many tasks and jobs in at once, each exactly once whatever happens, and tells the
// replies. Beside it lies send.mjs, as the documents have it.

import { encode } from "@msgpack/msgpack";
import { redis, send } from "./send.mjs";

const [, , queue, tasks, jobs] = process.argv;
const sent = [];
for (let n = 0; n < tasks; n++) sent.push(send("enqueue", queue, "-1", "0", `task ${n}`));
for (let n = 0; n < jobs; n++) {
  const options = Buffer.from(encode({ id: `job ${n}`, exists: "raise", lane: `lane ${n % 4}` }));
  sent.push(send("dispatch_jobs", queue, "0", options, `job ${n}`));
}
for (const reply of await Promise.all(sent)) console.log(JSON.stringify(reply));
await redis.close();
