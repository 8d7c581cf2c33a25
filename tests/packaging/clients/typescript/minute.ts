// The README's minute with the generated types: publish, read by ID, look up by hint, page.
import createClient from "openapi-fetch";
import type { paths } from "./api.js";

export async function minute(baseUrl: string, token: string): Promise<string[]> {
  const store = createClient<paths, "application/json" | "application/problem+json">({
    baseUrl,
    headers: { Authorization: `Bearer ${token}` },
  });
  const channel_id = "/garden/1/bees/proto";
  for (const number of [1, 2]) {
    const { data, error } = await store.POST("/v1/messages", {
      params: { header: { "Retrieval-Hint": "aa01,bb02" } },
      body: {
        message: {
          message_id: `m ${number}`,
          channel_id,
          sender_id: "ada",
          lamport_timestamp: `${number}`,
          content: "YnV6eg==",
        },
      },
    });
    if (error) throw new Error(error.code);
    if (data.outcome !== "stored") throw new Error(data.outcome);
  }

  const one = await store.GET("/v1/messages/{message_id}", {
    params: { path: { message_id: "m 1" } },
  });
  if (one.error) throw new Error(one.error.code);
  const contents: string[] = [one.data.message.content ?? ""];

  const hinted = await store.GET("/v1/hints/{hint}", { params: { path: { hint: "bb02" } } });
  if (hinted.error) throw new Error(hinted.error.code);
  contents.push(`${hinted.data.messages.length} hinted`);

  let after: string | undefined;
  do {
    const page = await store.GET("/v1/channels/{channel_id}/messages", {
      params: { path: { channel_id }, query: { limit: 1, after } },
    });
    if (page.error) throw new Error(page.error.code);
    contents.push(...page.data.messages.map((each) => each.message.message_id ?? ""));
    after = page.data.next ?? undefined;
  } while (after !== undefined);

  const missing = await store.GET("/v1/messages/{message_id}", {
    params: { path: { message_id: "nope" } },
  });
  contents.push(missing.error?.code ?? "found");
  return contents;
}
