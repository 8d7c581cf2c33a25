// Autobase (npm `autobase`) over JSON lines, one object a line in, one out.
//   {"op": "open", "count"} -> {"keys"}: that many indexers, each with a store of its own on disk, who have
//       all confirmed who the indexers are; closes those of the `open` before
//   {"op": "append", "writer"} -> {}
//   {"op": "sync", "left", "right"} -> {}: both know afterwards what one of them knew
//   {"op": "state", "writer"} -> {"indexed", "tip", "signed"}: node IDs in the order of this writer. What
//       is indexed is confirmed; a majority has also signed the view of what is signed
//   {"op": "nodes"} -> {"nodes": {ID: [IDs of its causes]}}
// A node's ID is "WRITER:LENGTH", where a writer is a number from 0. The nodes of `open` are left out.
// A failure -> {"error": text}.

import Autobase from "autobase";
// By path: the class whose calls show each node as it enters the graph, and the order that results.
import Linearizer from "./node_modules/autobase/lib/linearizer.js";
import b4a from "b4a";
import Corestore from "corestore";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const SYNC_MS = 10_000;
const ROUNDS = 3; // each indexer confirms the additions of all
const folder = mkdtempSync(join(tmpdir(), "autobase-"));
const hex = (key) => b4a.toString(key, "hex");
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let worlds = 0;
let bases = [];
let writers = new Map(); // hex of a writer's key: its number
let seen = new Map(); // a base: its nodes in the order of its linearizer
let added = [];
let prepared = new Set(); // the nodes of `open`

const idOf = ({ key, length }) => `${writers.get(hex(key))}:${length}`;
const idOfNode = (node) => idOf({ key: node.writer.core.key, length: node.length });

const { addHead, update } = Linearizer.prototype;
Linearizer.prototype.addHead = function (node) {
  added.push(node);
  return addHead.call(this, node);
};
Linearizer.prototype.update = function () {
  const updated = update.call(this);
  if (updated !== null && updated.length > 0) {
    const { base } = (updated.indexed[0] ?? updated.tip[0]).writer;
    const { indexed } = seen.get(base) ?? { indexed: [] };
    seen.set(base, { indexed: [...indexed, ...updated.indexed], tip: [...updated.tip] });
  }
  return updated;
};

async function apply(batch, view, host) {
  for (const { from, length, value } of batch) {
    if (value === null) continue;
    if (value.add) await host.addWriter(b4a.from(value.add, "hex"), { indexer: true });
    await view.append({ id: idOf({ key: from.key, length }) });
  }
}

async function openBase(number, key) {
  const primaryKey = b4a.alloc(32, number + 1);
  const store = new Corestore(join(folder, `${worlds}-${number}`), { primaryKey, unsafe: true });
  const base = new Autobase(store, key, {
    ackInterval: 0,
    apply,
    fastForward: false,
    open: (views) => views.get("view", { valueEncoding: "json" }),
    valueEncoding: "json",
  });
  await base.ready();
  writers.set(hex(base.local.key), number);
  return base;
}

const headsOf = (base) => base.heads().map(idOf).sort().join();

async function sync(left, right) {
  const there = left.replicate(true);
  const back = right.replicate(false);
  for (const stream of [there, back]) stream.on("error", () => {});
  there.pipe(back).pipe(there);
  const endMs = Date.now() + SYNC_MS;
  for (;;) {
    await left.update();
    await right.update();
    if (headsOf(left) === headsOf(right)) break;
    if (Date.now() > endMs) throw new Error(`no agreement on heads: ${headsOf(left)} | ${headsOf(right)}`);
    await sleep(1);
  }
  const closed = [there, back].map((stream) => new Promise((resolve) => stream.on("close", resolve)));
  there.destroy();
  back.destroy();
  await Promise.all(closed);
}

async function closeAll() {
  await Promise.all(bases.map((base) => base.close()));
  [bases, writers, seen, added, prepared] = [[], new Map(), new Map(), [], new Set()];
}

const operations = {
  async open({ count }) {
    await closeAll();
    worlds++;
    for (let i = 0; i < count; i++) bases.push(await openBase(i, i ? bases[0].key : null));
    for (const base of bases.slice(1)) await bases[0].append({ add: hex(base.local.key) });
    for (const base of bases.slice(1)) await sync(bases[0], base);
    for (let turn = 0; turn < ROUNDS * count; turn++) {
      const base = bases[turn % count];
      await base.append({ text: "" });
      for (const other of bases) if (other !== base) await sync(base, other);
    }
    prepared = new Set(added.map(idOfNode));
    for (const base of bases) {
      if (base.linearizer.indexers.length !== count) throw new Error("a writer is no indexer yet");
    }
    return { keys: bases.map((base) => hex(base.local.key)) };
  },
  async append({ writer }) {
    await bases[writer].append({ text: "x" });
    return {};
  },
  async sync({ left, right }) {
    await sync(bases[left], bases[right]);
    return {};
  },
  async state({ writer }) {
    const base = bases[writer];
    await base.update();
    const isNew = (id) => !prepared.has(id);
    const { indexed, tip } = seen.get(base);
    const ordered = { indexed: indexed.map(idOfNode).filter(isNew), tip: tip.map(idOfNode).filter(isNew) };
    const signed = [];
    for (let at = 0; at < base.view.signedLength; at++) signed.push((await base.view.get(at)).id);
    return { ...ordered, signed: signed.filter(isNew) };
  },
  async nodes() {
    const nodes = {};
    for (const node of added) {
      const id = idOfNode(node);
      if (prepared.has(id)) continue;
      const { key } = node.writer.core;
      const causes = [{ key, length: node.length - 1 }, ...node.actualHeads].map(idOf);
      nodes[id] = [...new Set(causes)].filter((cause) => !prepared.has(cause));
    }
    return { nodes };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { op, ...given } = JSON.parse(line);
  try {
    console.log(JSON.stringify(await operations[op](given)));
  } catch (error) {
    console.log(JSON.stringify({ error: `${op}: ${error.stack}` }));
  }
}
await closeAll();
rmSync(folder, { recursive: true, force: true });
process.exit(0);
