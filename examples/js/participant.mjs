// An SDS participant of js-waku on a store node: it sends the lines of its input to a channel and prints
// what others send. When a message refers to one that it missed, it fetches that one from the node.
import { createHash } from "node:crypto";
import { createInterface } from "node:readline";
import { Readable } from "node:stream";
import { Message, MessageChannel, MessageChannelEvent } from "@waku/sds";

const [node, channelId, senderId] = process.argv.slice(2);
if (!senderId) fail("usage: node participant.mjs NODE CHANNEL NAME");
const channel = new MessageChannel(channelId, senderId, { causalHistorySize: 2 });
const hintOf = (frame) => createHash("sha256").update(frame).digest(); // the node accepts any bytes
function fail(why) { console.error(why); process.exit(1); }
const received = new Map();
channel.addEventListener(MessageChannelEvent.InMessageReceived, ({ detail }) => received.set(detail.messageId, detail));
channel.addEventListener(MessageChannelEvent.InMessageDelivered, ({ detail: id }) =>
  console.log(`${received.get(id).senderId}: ${Buffer.from(received.get(id).content)}`));

async function publish(message) {
  const body = message.encode(), retrievalHint = hintOf(body);
  const headers = { "Content-Type": "application/x-protobuf", "Retrieval-Hint": retrievalHint.toString("hex") };
  const { ok: success } = await fetch(`${node}/v1/messages`, { method: "POST", headers, body });
  return { success, retrievalHint };
}

async function receive(digest) {
  const entry = await fetch(`${node}/v1/entries/${digest}`, { headers: { Accept: "application/x-protobuf" } });
  const frame = Buffer.from(await entry.arrayBuffer()), message = Message.decode(frame);
  if (message) channel.pushIncomingMessage(message, hintOf(frame));
  await channel.processTasks();
}

async function fetchMissing(asked) { // those that fetched messages refer to as well
  const missing = channel.sweepIncomingBuffer().filter(({ messageId }) => !asked.has(messageId));
  const retrieval_hints = missing.flatMap(({ retrievalHint }) => retrievalHint ? Buffer.from(retrievalHint).toString("hex") : []);
  const message_ids = missing.flatMap(({ retrievalHint, messageId }) => retrievalHint ? [] : messageId);
  if (missing.length === 0) return;
  const body = JSON.stringify({ channel_id: channelId, retrieval_hints, message_ids });
  const headers = { "Content-Type": "application/json" };
  const { found } = await (await fetch(`${node}/v1/messages/lookup`, { method: "POST", headers, body })).json();
  for (const { digest } of found) await receive(digest);
  await fetchMissing(new Set([...asked, ...missing.map(({ messageId }) => messageId)]));
}

async function listen() {
  const live = await fetch(`${node}/v1/channels/live?${new URLSearchParams({ channel_id: channelId })}`);
  console.error("listening");
  for await (const line of createInterface({ input: Readable.fromWeb(live.body) })) {
    const digest = line.startsWith("data:") && JSON.parse(line.slice(5)).meta?.digest;
    if (digest) await receive(digest).then(() => fetchMissing(new Set()));
  }
}

listen().catch((error) => fail(`${node} does not answer: ${error.cause?.message || error.message}. Start again under another name.`));
for await (const line of createInterface({ input: process.stdin })) {
  if (line) channel.pushOutgoingMessage(Buffer.from(line), publish);
  await channel.processTasks();
}
process.exit();
