// What js-waku's SDS costs, for bench/participant.py. JSON lines as in peer.mjs:
//   {"messages", "measured", "dialogue", "filter"} -> {"send_us", "receive_us"}
// Two participants share a channel of so many messages. The figures are CPU time per message, of the last
// "measured" ones. In a dialogue both send in turn and so acknowledge each other. Without "filter" the
// filters are taken out of the frames on their way.

import { createInterface } from "node:readline";
import { Message, MessageChannel } from "@waku/sds";

let nowMs = 1_763_000_000_000;
Date.now = () => nowMs;

const options = { causalHistorySize: 2 };
const success = { success: true, retrievalHint: new Uint8Array(32).fill(7) };

async function measure({ messages, measured, dialogue, filter }) {
  const channels = ["alice", "bob"].map((name) => new MessageChannel("channel", name, options));
  let sendUs = 0, receiveUs = 0;
  for (let number = 0; number < messages; number++) {
    nowMs += 1_000;
    const at = dialogue ? number % 2 : 0;
    const [sender, receiver] = [channels[at], channels[1 - at]];
    const content = new TextEncoder().encode(`message ${number} `.padEnd(100, "."));
    let frame;
    const isMeasured = number >= messages - measured;
    const before = isMeasured && process.cpuUsage();
    sender.pushOutgoingMessage(content, async (message) => {
      frame = message.encode();
      return success;
    });
    await sender.processTasks();
    if (isMeasured) sendUs += microseconds(process.cpuUsage(before));
    if (!filter) {
      const message = Message.decode(frame);
      message.bloomFilter = undefined;
      frame = message.encode();
    }
    const between = isMeasured && process.cpuUsage();
    receiver.pushIncomingMessage(Message.decode(frame), success.retrievalHint);
    await receiver.processTasks();
    if (isMeasured) receiveUs += microseconds(process.cpuUsage(between));
  }
  return { send_us: sendUs / measured, receive_us: receiveUs / measured };
}

const microseconds = ({ user, system }) => user + system;

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(JSON.stringify(await measure(JSON.parse(line))) + "\n");
}
