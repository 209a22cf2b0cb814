import { createHash, randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { ErrorReply, type createClient } from "redis";

/** A client of the package `redis`, version 6.3 or later, connected. Version 5 can mix up replies when it connects again. */
export type Redis = Pick<ReturnType<typeof createClient>, "isOpen" | "sendCommand">;
export type Argument = string | Buffer;
export type Reply = Buffer | number | null | Reply[];
type Wire = string | number | boolean | { [name: string]: Wire };

export class WorqrError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}
/** A value that cannot be sent. Nothing was sent. */
export class UsageError extends WorqrError {}
/** The server did not answer within `patience`. The request may have taken effect. */
export class Unavailable extends WorqrError {}
/** The queue is at its largest length. Nothing was stored. */
export class QueueFull extends WorqrError {}
/** The id is taken, and `ifExists` is "raise", or `uniqueFor` keeps it. Nothing was stored. */
export class Duplicate extends WorqrError {}
/** The job has not ended within the time that `result` had. */
export class ResultTimeout extends WorqrError {}
/** The job has no result: none was kept, it has expired, or the job is unknown. */
export class NoResult extends WorqrError {}
/** The job was cancelled. The message is the reason. */
export class JobCancelled extends WorqrError {}
/** The job has failed for good. `type` is the class of the error in Python. */
export class JobFailed extends WorqrError {
  type = "";
  traceback = "";
}

const SOURCES = SOURCES_OF_SCRIPTS;
const SHAS = new Map(Object.entries(SOURCES).map(([name, text]) => [name, createHash("sha1").update(text).digest("hex")]));
export type Script = keyof typeof SOURCES;
const LATER = /^(LOADING|BUSY|TRYAGAIN|MASTERDOWN|READONLY|CLUSTERDOWN) /; // nothing was done, and soon it can be
const BULK = "$".charCodeAt(0); // the type of texts in replies
const LONGEST_PATIENCE = 40 * 60; // the server forgets after an hour what a producer has sent
const WIRE_VERSION = "1";

export interface Settings {
  /** Seconds in which a request is sent again until it has an answer, up to 2,400. Default: 30. */
  patience?: number;
  /** The name of this producer, which no other process may have. Default: 128 random bits. */
  producer?: string;
}

/** Sends requests. A request is sent again until it has an answer, under its number, so the server does it once. */
export class Producer {
  readonly #redis: Redis;
  readonly #patience: number;
  readonly #name: string;
  readonly #numbers = new Map<string, { last: number; open: Set<number> }>();
  #version: Promise<void> | undefined;

  constructor(redis: Redis, settings: Settings = {}) {
    this.#redis = redis;
    this.#patience = 1000 * Math.min(nonNegative(settings.patience ?? 30, "patience"), LONGEST_PATIENCE);
    this.#name = settings.producer ?? randomBytes(16).toString("hex");
  }

  /** Run a script that changes something on the queue with this key, once. */
  async send(script: Script, base: string, args: Argument[]): Promise<Reply[]> {
    let numbers = this.#numbers.get(base);
    if (!numbers) this.#numbers.set(base, (numbers = { last: 0, open: new Set() }));
    const number = ++numbers.last;
    numbers.open.add(number);
    try {
      const [lowest = number] = numbers.open;
      return await this.ask(script, base, [this.#name, `${number}`, `${lowest}`, ...args]);
    } finally {
      numbers.open.delete(number);
    }
  }

  /** Run a script that only reads. */
  async ask(script: Script, base: string, args: Argument[]): Promise<Reply[]> {
    await (this.#version ??= this.#checkVersion());
    const sha = SHAS.get(script) as string;
    let isLoaded = true;
    return await this.#untilAnswered(
      () => [...(isLoaded ? ["EVALSHA", sha] : ["EVAL", SOURCES[script]]), "1", base, ...args],
      (error) => error.message.startsWith("NOSCRIPT") && !(isLoaded = false),
    );
  }

  async #checkVersion(): Promise<void> {
    try {
      const version = await this.#untilAnswered<Buffer | null>(() => ["GET", `{${PREFIX}}:version`], () => false);
      if (version !== null && String(version) !== WIRE_VERSION)
        throw new WorqrError(`the mesh has the wire version ${version}, this client ${WIRE_VERSION}: generate it again`);
    } catch (error) {
      this.#version = undefined; // the next request looks again
      throw error;
    }
  }

  async #untilAnswered<T = Reply[]>(command: () => Argument[], isSentAgain: (error: ErrorReply) => boolean): Promise<T> {
    const began = [Date.now(), performance.now()] as const; // the first one runs while the machine sleeps
    for (;;) {
      const left = this.#patience - Math.max(Date.now() - began[0], performance.now() - began[1]);
      try {
        return await this.#within<T>(left, command());
      } catch (error) {
        if (error instanceof ErrorReply) {
          if (LATER.test(error.message)) await sleep(100);
          else if (!isSentAgain(error)) throw error;
        } else if (isLostConnection(error) && this.#redis.isOpen) await sleep(20);
        else throw error;
      }
    }
  }

  /** Send a command. After so many milliseconds, take it back if it was not written yet, and throw an error. */
  async #within<T>(milliseconds: number, command: Argument[]): Promise<T> {
    const abort = new AbortController();
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        reject(new Unavailable("the server did not answer in time: the request may have taken effect"));
        abort.abort();
      }, milliseconds);
    });
    const options = { abortSignal: abort.signal, typeMapping: { [BULK]: Buffer } };
    try {
      return await Promise.race([late, milliseconds > 0 ? this.#redis.sendCommand<T>(command, options) : late]);
    } finally {
      clearTimeout(timer);
    }
  }
}

function isLostConnection(error: unknown): boolean {
  return error instanceof Error && !(error instanceof WorqrError) && !(error instanceof TypeError);
}

function nonNegative(value: number, what: string): number {
  if (!(value >= 0 && value <= Number.MAX_SAFE_INTEGER)) throw new UsageError(`${what} must be a number of at least 0, not ${value}`);
  return value;
}

const milliseconds = (seconds: number, what: string): number => Math.round(nonNegative(seconds, what) * 1000);

/** Options of a dispatch. Times are in seconds. */
export interface DispatchOptions {
  /** The id of the job. Default: a new one. */
  id?: string;
  delay?: number;
  runAt?: Date;
  /** Seconds, or a time, after which the job is dropped if it has not started. */
  expires?: number | Date;
  /** If a job with this id waits. Default: "update". */
  ifExists?: "update" | "skip" | "raise" | "cancel";
  /** Seconds for which the id stays taken. */
  uniqueFor?: number;
  resultTtl?: number;
  timeout?: number;
  meta?: Readonly<Record<string, string>>;
  maxLength?: number;
  lane?: string;
  front?: boolean;
  tags?: readonly string[];
}

const OPTIONS: { [K in keyof DispatchOptions]-?: (value: NonNullable<DispatchOptions[K]>) => { [name: string]: Wire } } = {
  id: (id) => ({ id }),
  delay: (delay) => ({ delay: milliseconds(delay, "delay") }),
  runAt: (time) => ({ run_at: timeOf(time, "runAt").getTime() }),
  expires: (end) =>
    end instanceof Date ? { expires_at: `${timeOf(end, "expires").getTime()}` } : { expires: `${milliseconds(end, "expires")}` },
  ifExists: (exists) => ({ exists }),
  uniqueFor: (time) => ({ unique_for: milliseconds(time, "uniqueFor") }),
  resultTtl: (time) => ({ fields: { result_ttl: `${milliseconds(time, "resultTtl")}` } }),
  timeout: (time) => ({ fields: { timeout: `${milliseconds(time, "timeout")}` } }),
  meta: (meta) => ({ meta: json(meta, "meta") }),
  maxLength: (length) => ({ max_length: Math.trunc(nonNegative(length, "maxLength")) }),
  lane: (lane) => ({ lane }),
  front: (front) => ({ front }),
  tags: (tags): { [name: string]: Wire } => (tags.length ? { tags: tags.join("\n") } : {}),
};

function wireOptions(given: DispatchOptions): { [name: string]: Wire } {
  const found: { [name: string]: Wire } = {};
  const fields: { [name: string]: Wire } = {};
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined) continue;
    if (!Object.hasOwn(OPTIONS, name)) throw new UsageError(`a dispatch has no option ${name}`);
    const { fields: more, ...rest } = (OPTIONS[name as keyof DispatchOptions] as (value: unknown) => { [name: string]: Wire })(value);
    Object.assign(found, rest);
    Object.assign(fields, more);
  }
  return Object.keys(fields).length ? { ...found, fields } : found;
}

/** The tags of the function, and those of the dispatch. */
function withTags(...options: { [name: string]: Wire }[]): { [name: string]: Wire } {
  const names = options.flatMap(({ tags }) => (typeof tags === "string" ? tags.split("\n") : []));
  return names.length ? { tags: [...new Set(names)].join("\n") } : {};
}

/** MessagePack of what the options of a job are made of. */
function packed(value: Wire): Buffer {
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "number") {
    const bytes = Buffer.alloc(9, 0xcf);
    bytes.writeBigUInt64BE(BigInt(value), 1);
    return bytes;
  }
  const content = typeof value === "string" ? Buffer.from(value) : null;
  const head = Buffer.alloc(5, content ? 0xdb : 0xdf); // a text or a map, and its length
  if (content || typeof value === "string") {
    head.writeUInt32BE(content?.length ?? 0, 1);
    return Buffer.concat([head, content ?? Buffer.alloc(0)]);
  }
  const entries = Object.entries(value);
  head.writeUInt32BE(entries.length, 1);
  return Buffer.concat([head, ...entries.flatMap((entry) => entry.map(packed))]);
}

function timeOf(time: Date, path: string): Date {
  const year = time.getUTCFullYear();
  if (!(year >= 1 && year <= 9999)) throw new UsageError(`${path} is ${time}, and must be in the years 1 to 9999`);
  return time;
}

/** JSON as the worker reads it. Dates are times in UTC, bytes are base64, sets are arrays, and a bigint is a number. */
function json(value: unknown, path: string): string {
  if (typeof value === "string") {
    if (/\p{Surrogate}/u.test(value)) throw new UsageError(`${path} has half of a surrogate pair, which is no valid text`);
    return JSON.stringify(value);
  }
  if (typeof value === "number" && Number.isFinite(value)) return Number.isInteger(value) ? `${BigInt(value)}` : `${value}`;
  if (value === null || typeof value === "boolean" || typeof value === "bigint") return `${value}`;
  if (value instanceof Uint8Array) return `"${Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64")}"`;
  if (value instanceof Date) return `"${timeOf(value, path).toISOString()}"`;
  if (Array.isArray(value) || value instanceof Set) return `[${Array.from(value, (item, i) => json(item, `${path}[${i}]`)).join()}]`;
  if (typeof value !== "object") throw new UsageError(`${path} is ${String(value)}, which JSON does not know`);
  if ("toJSON" in value && typeof value.toJSON === "function") return json(value.toJSON(), path);
  const entries = value instanceof Map ? [...value] : Object.entries(value).filter(([, item]) => item !== undefined);
  return `{${entries.map(([key, item]) => `${json(`${key}`, path)}:${json(item, `${path}.${key}`)}`).join()}}`;
}

/** What a result is in JavaScript. */
function parsed(value: Reply | undefined): unknown {
  if (value instanceof Buffer && value[0] === 0xc1) // which begins no JSON
    throw new WorqrError("the result was encoded by the codec of the mesh, which this client does not have: read it in Python");
  const text = textOf(value);
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g))
    if (/^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token)))
      throw new WorqrError(`the result has the integer ${token}, which no number of JavaScript is: return it as a text`);
  return JSON.parse(text);
}

export interface Status {
  state: "waiting" | "scheduled" | "suspended" | "blocked" | "active" | "finished" | "failed" | "cancelled" | "gone";
  worker: string | null;
  runAt: Date | null;
  progress: number | null;
  message: string;
  failures: number;
  attempts: number;
  /** What the last run raised. */
  error: { type: string; message: string } | null;
}

const textOf = (value: Reply | undefined): string => (value === null || value === undefined ? "" : String(value));
const numberOf = (value: Reply | undefined): number | null => (value === null || value === undefined ? null : Number(value));

/** One job. */
export class Job<R> {
  readonly #producer: Producer;
  readonly #base: string;
  readonly #number: string;
  readonly id: string;
  /** What its dispatch did; null for a job of which only the id is known. */
  readonly outcome: "created" | "updated" | "blocked" | "unchanged" | null;

  constructor(producer: Producer, base: string, id: string, number = "0", outcome: Job<R>["outcome"] = null) {
    [this.#producer, this.#base, this.id, this.#number, this.outcome] = [producer, base, id, number, outcome];
  }

  async status(): Promise<Status> {
    const [word, , worker, runAt, progress, message, failures, attempts, type, text] = await this.#read("job_status");
    const time = numberOf(runAt);
    return {
      state: (textOf(word) === "due" ? "scheduled" : textOf(word)) as Status["state"],
      worker: worker ? textOf(worker) : null,
      runAt: time === null ? null : new Date(time),
      progress: numberOf(progress),
      message: textOf(message),
      failures: numberOf(failures) ?? 0,
      attempts: numberOf(attempts) ?? 0,
      error: textOf(type) ? { type: textOf(type), message: textOf(text) } : null,
    };
  }

  /** Wait until the job has ended, and return what the function returned. It asks the server, soon once a second. */
  async result(within = Infinity): Promise<R> {
    const began = performance.now();
    for (let pause = 10; ; pause = Math.min(2 * pause, 1000)) {
      const [word, first, second, third] = await this.#read("read_result");
      switch (textOf(word)) {
        case "finished":
          if (textOf(first) === "bytes") return second as R;
          return (textOf(first) === "none" ? null : parsed(second)) as R;
        case "failed":
          throw Object.assign(new JobFailed(`${textOf(first)}: ${textOf(second)}`), { type: textOf(first), traceback: textOf(third) });
        case "cancelled":
          throw new JobCancelled(textOf(first));
        case "wait":
          break;
        default:
          throw new NoResult(`the job ${this.id} has no result: ${textOf(word)}; a function keeps results with result_ttl`);
      }
      const left = within * 1000 - (performance.now() - began);
      if (left <= 0) throw new ResultTimeout(`the job ${this.id} had not ended after ${within} s`);
      await sleep(Math.min(pause, left));
    }
  }

  /** Cancel the job. True if it waited and is deleted, or runs and its worker was told. */
  async cancel(reason = ""): Promise<boolean> {
    const [word, waiting, ...claims] = await this.#producer.send("cancel_job", this.#base, [this.id, reason]);
    if (textOf(word) !== "ok") throw new WorqrError(`the server answered ${textOf(word)}: nothing was cancelled`);
    return waiting !== 0 || claims.length > 0;
  }

  async #read(script: Script): Promise<Reply[]> {
    return await this.#producer.ask(script, this.#base, [this.#number, this.id]);
  }
}

interface How {
  /** The whole payload is the one argument, as bytes. */
  raw?: boolean;
  /** How many arguments a call has: 0 or 1. */
  takes: number;
  options: { [name: string]: Wire };
}

/** A function of the mesh: how its calls are sent. */
export class Task<A extends unknown[], R, O = DispatchOptions> {
  readonly #producer: Producer;
  readonly #base: string;
  readonly #how: How;
  readonly name: string;

  constructor(producer: Producer, name: string, how: How) {
    [this.#producer, this.name, this.#base, this.#how] = [producer, name, `${PREFIX}:{${name}}`, how];
  }

  /** Enqueue a call as a plain task, which costs least and has no handle; as a job, if the function keeps jobs or has tags. */
  async enqueue(...given: A): Promise<void> {
    const { max_length: bound = -1, done, tags } = this.#how.options;
    if (done !== undefined || tags !== undefined) {
      await this.#dispatched(given);
      return;
    }
    const [word, waiting] = await this.#producer.send("enqueue", this.#base, [`${bound as number}`, "0", this.#payload(given)]);
    if (textOf(word) === "full") throw new QueueFull(`${textOf(waiting)} tasks wait in ${this.name}: nothing was stored`);
    if (textOf(word) !== "ok") throw new WorqrError(`the server answered ${textOf(word)}`);
  }

  /** Dispatch a call as a job, with an id, and with a result if the function keeps results. */
  async dispatch(...given: [...A, options?: O]): Promise<Job<R>> {
    return await this.#dispatched(given);
  }

  async #dispatched(given: readonly unknown[]): Promise<Job<R>> {
    const own = wireOptions((given[this.#how.takes] ?? {}) as DispatchOptions);
    if ("unique_for" in own && !("id" in own)) throw new UsageError("uniqueFor needs an id: it is the id that stays taken");
    if ("delay" in own && "run_at" in own) throw new UsageError("a dispatch takes a delay or a runAt, not both");
    const random = "id" in own ? {} : { random: randomBytes(16).toString("hex") };
    const options = { ...this.#how.options, ...own, ...withTags(this.#how.options, own), ...random };
    const reply = await this.#producer.send("dispatch_jobs", this.#base, ["0", packed(options), this.#payload(given)]);
    if (textOf(reply[0]) !== "ok") throw new WorqrError(`the server answered ${textOf(reply[0])}: nothing was stored`);
    const [outcome, id, number] = reply[1] as Reply[];
    const word = textOf(outcome);
    if (word === "full") throw new QueueFull(`${this.name} is at its largest length: nothing was stored`);
    if (word === "duplicate") throw new Duplicate(`the id ${textOf(id)} is taken in ${this.name}: nothing was stored`);
    return new Job(this.#producer, this.#base, textOf(id), textOf(number), word as Job<R>["outcome"]);
  }

  /** The newest job with this id. */
  job(id: string): Job<R> {
    return new Job(this.#producer, this.#base, id);
  }

  #payload(given: readonly unknown[]): Argument {
    const [value] = given;
    if (!this.#how.raw) return json(value === undefined ? {} : value, this.name);
    if (!(value instanceof Uint8Array)) throw new UsageError(`${this.name} takes a Uint8Array`);
    return Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  }
}
