// js-waku's SDS (@waku/sds) over JSON lines, one object a line in, one out; bytes are hexadecimal.
//   {"op": "clock", "now_ms"}                              -> {}
//   {"op": "open", "peer", "channel", "sender", "options"} -> {}
//   {"op": "send", "peer", "content", "lost", "repeat"}    -> {"id", "frame", "hint", "events"}
//   {"op": "ephemeral", "peer", "content"}                 -> {"id", "frame", "events"}
//   {"op": "sync", "peer"}                                 -> {"frame" or null, "events"}
//   {"op": "receive", "peer", "frame", "hint"}             -> {"decoded", "events"}
//   {"op": "sweep", "peer"}     -> {"missing", "repairs", "unacknowledged", "possibly", "events"}
//   {"op": "state", "peer"}     -> {"lamport", "log", "incoming", "outgoing", "filter"}
//   {"op": "bloom", "ids"}      -> {"filter"}
// Any number of peers live in the process, under one clock: Date.now() is what "clock" set last, and
// the package has no timers. A failure of the package -> {"error": text}.

import { createHash } from "node:crypto";
import { createInterface } from "node:readline";
import { Message, MessageChannel, MessageChannelEvent } from "@waku/sds";
// By path: the package's entry exports the class without its parameters.
import { DefaultBloomFilter } from "./node_modules/@waku/sds/dist/bloom_filter/bloom.js";

let nowMs = 0;
Date.now = () => nowMs;
let drawn = 0;
Math.random = () => (createHash("sha256").update(String(drawn++)).digest().readUInt32BE() + 0.5) / 2 ** 32;

const hex = (bytes) => (bytes === undefined ? null : Buffer.from(bytes).toString("hex"));
const bytes = (text) => new Uint8Array(Buffer.from(text, "hex"));
// The hint of a message is the test's own choice; a transport would give its hash of the message.
const hintOf = (frame) => new Uint8Array(createHash("sha256").update(frame).digest());
const entry = ({ messageId, retrievalHint, senderId }) => [messageId, hex(retrievalHint), senderId ?? null];

// "RepairRequestQueued" and "RepairResponseQueued" are dispatched under these names, not the enum's.
const EVENTS = [...Object.values(MessageChannelEvent), "RepairRequestQueued", "RepairResponseQueued"];

class Peer {
  constructor(channel, sender, options) {
    this.channel = new MessageChannel(channel, sender, options);
    this.events = [];
    for (const name of EVENTS) {
      this.channel.addEventListener(name, ({ detail }) => this.events.push([name, plain(detail)]));
    }
  }

  taken(answer) {
    const events = this.events;
    this.events = [];
    return { ...answer, events };
  }

  // `lost`: the transport reports that it could not send.
  async send({ content, lost = false }) {
    let sent;
    this.channel.pushOutgoingMessage(bytes(content), async (message) => {
      const frame = message.encode();
      sent = { id: message.messageId, frame: hex(frame), hint: hex(hintOf(frame)) };
      return { success: !lost, retrievalHint: hintOf(frame) };
    });
    await this.channel.processTasks();
    return this.taken(sent);
  }

  async ephemeral({ content }) {
    let sent;
    this.channel.pushOutgoingEphemeralMessage(bytes(content), async (message) => {
      sent = { id: message.messageId, frame: hex(message.encode()) };
      return true;
    });
    await this.channel.processTasks();
    return this.taken(sent);
  }

  async sync() {
    let frame = null;
    await this.channel.pushOutgoingSyncMessage(async (message) => {
      frame = hex(message.encode());
      return true;
    });
    return this.taken({ frame });
  }

  async receive({ frame, hint = null }) {
    const message = Message.decode(bytes(frame));
    if (message) {
      this.channel.pushIncomingMessage(message, hint === null ? undefined : bytes(hint));
      await this.channel.processTasks();
    }
    return this.taken({ decoded: message?.messageId ?? null });
  }

  // What an application calls every few seconds.
  async sweep() {
    const missing = this.channel.sweepIncomingBuffer().map(entry);
    const repairs = [];
    await this.channel.sweepRepairIncomingBuffer(async (message) => {
      repairs.push(hex(message.encode()));
      return true;
    });
    const { unacknowledged, possiblyAcknowledged } = this.channel.sweepOutgoingBuffer();
    const frames = (messages) => messages.map((message) => hex(message.encode()));
    return this.taken({
      missing, repairs, unacknowledged: frames(unacknowledged), possibly: frames(possiblyAcknowledged),
    });
  }

  // Parts that the package calls private.
  state() {
    const ids = (messages) => messages.map(({ messageId }) => messageId);
    const { lamportTimestamp, localHistory, incomingBuffer, outgoingBuffer, filter } = this.channel;
    return {
      lamport: String(lamportTimestamp), log: ids(localHistory.slice()),
      incoming: ids(incomingBuffer), outgoing: ids(outgoingBuffer), filter: hex(filter.toBytes()),
    };
  }
}

function plain(detail) {
  if (typeof detail === "string") return detail;
  if (Array.isArray(detail)) return detail.map(({ messageId }) => messageId);
  if (detail.error) return String(detail.error);
  if (detail.tReq ?? detail.tResp) return [detail.messageId, detail.tReq ?? detail.tResp];
  return detail.messageId ?? detail.messageIds;
}

const peers = {};

const operations = {
  clock({ now_ms }) {
    nowMs = now_ms;
    return {};
  },
  open({ peer, channel, sender, options = {} }) {
    peers[peer] = new Peer(channel, sender, options);
    return {};
  },
  bloom({ ids }) {
    const filter = new DefaultBloomFilter({ capacity: 10000, errorRate: 0.001 });
    for (const id of ids) filter.insert(id);
    return { filter: hex(filter.toBytes()) };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { op, ...request } = JSON.parse(line);
  let reply;
  try {
    reply = operations[op] ? await operations[op](request) : await peers[request.peer][op](request);
  } catch (error) {
    reply = { error: error.stack };
  }
  process.stdout.write(JSON.stringify(reply) + "\n");
}
