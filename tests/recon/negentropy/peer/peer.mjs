// Other projects' negentropy, one JSON object a line in, one out.
//   {"op": "open", "peer": "nostr-tools" | "welshman", "limit": bytes or 0, "items": [[timestamp, hex ID], ...]} -> {}
//   {"op": "initiate"}                                -> {"message": hex}
//   {"op": "answer", "message": hex}                  -> {"message": hex or null, "have": [hex], "need": [hex]}
// A failure of the implementation -> {"error": text}. After "initiate" a peer is the client, else the server.

import nodeCrypto from "node:crypto";
import { createInterface } from "node:readline";
import { nip77 as nostrTools } from "nostr-tools";
// By path: the package's entry needs its peer packages.
import * as welshman from "./node_modules/@welshman/net/dist/net/src/negentropy.js";

// It expects node's crypto module under this name, as scripts see it that are not modules.
Object.defineProperty(globalThis, "crypto", { value: nodeCrypto });

class NostrToolsClient {
  constructor(limit, items) {
    const storage = new nostrTools.NegentropyStorageVector();
    for (const [timestamp, id] of items) storage.insert(timestamp, id);
    storage.seal();
    this.negentropy = new nostrTools.Negentropy(storage, limit || Infinity);
  }

  initiate() {
    return this.negentropy.initiate();
  }

  answer(message) {
    const have = [], need = [];
    const next = this.negentropy.reconcile(message, (id) => have.push(id), (id) => need.push(id));
    return { message: next, have, need };
  }
}

class Welshman {
  constructor(limit, items) {
    const storage = new welshman.NegentropyStorageVector();
    for (const [timestamp, id] of items) storage.insert(timestamp, id);
    storage.seal();
    this.negentropy = new welshman.Negentropy(storage, limit);
  }

  initiate() {
    return this.negentropy.initiate();
  }

  async answer(query) {
    const [message, have, need] = await this.negentropy.reconcile(query);
    return { message, have, need };
  }
}

const peers = { "nostr-tools": NostrToolsClient, welshman: Welshman };
let peer;

const operations = {
  open({ peer: name, limit, items }) {
    peer = new peers[name](limit, items);
    return {};
  },
  async initiate() {
    return { message: await peer.initiate() };
  },
  answer({ message }) {
    return peer.answer(message);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let reply;
  try {
    reply = await operations[request.op](request);
  } catch (error) {
    reply = { error: String(error) };
  }
  process.stdout.write(JSON.stringify(reply) + "\n");
}
