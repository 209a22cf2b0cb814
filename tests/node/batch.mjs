// batch.mjs HOME QUEUE MEMBERS: makes a batch at HOME with members in HOME and in QUEUE, and a follow-up in HOME. Requests that
// have no number are sent twice, as after a connection that broke. Beside it lies send.mjs, as the documents have it.

import { randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import { encode } from "@msgpack/msgpack";
import { redis, send } from "./send.mjs";

const [, , home, queue, members] = process.argv;
const producer = randomBytes(16).toString("hex");
const token = randomBytes(16).toString("hex");
const id = "report";
const SHARED = new Set(["open_batch", "seal_batch", "close_part"]); // their scripts have other transactions, too

async function script(name, keys, args) {
  const sha = await redis.scriptLoad(await readFile(`${name}.lua`, "utf-8"));
  const named = SHARED.has(name) ? [...args, name] : args;
  const first = await redis.evalSha(sha, { keys, arguments: named });
  const again = await redis.evalSha(sha, { keys, arguments: named });
  if (JSON.stringify(first) !== JSON.stringify(again)) throw new Error(`${name}: ${first}, then ${again}`);
  return first;
}

const facts = ["then", home, "then_options", Buffer.from(encode({})), "then_task", "all done", "meta", '{"by": "node"}'];
const numbers = ["1", "1"]; // the one request of this producer to the home that has a number
const opening = [producer, ...numbers, id, token, "3600000", "60000", "", ...facts];
console.log(...(await script("open_batch", [home], opening)));

for (const part of [home, queue]) {
  const [word, version, sealed, , keep, on_failed] = await script("open_part", [home], [id, token, part, "1000"]);
  console.log(word, version, sealed);
  const option = { token, home, id, number: Number(version), keep };
  if (sealed) option.sealed = true;
  if (on_failed) option.on_failed = on_failed;
  for (let n = 0; n < members; n++) {
    const options = Buffer.from(encode({ id: `job ${n}`, batch: option }));
    const [, [outcome, name]] = await send("dispatch_jobs", part, "0", options, `job ${n}`);
    console.log(outcome, name);
  }
}

const [word, state, keep, ...parts] = await script("seal_batch", [home], [id, token]);
console.log(word, state, parts.length);
for (let n = 0; n < parts.length; n += 2) {
  const [base, version] = [parts[n], parts[n + 1]];
  console.log(...(await script("close_part", [base], [token, version, home, id, keep])));
}
await redis.close();
