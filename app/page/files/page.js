// Keeps parts of the page up to date. An element with data-stream names a stream of HTML that the node
// rendered: an event "part" has elements that take the place of those with their IDs, "rows" has rows for the
// top of the table. A tab that nobody sees has no stream, because a browser opens six connections to a host.
"use strict";

const ROWS_MAX = 200;
const streams = new Map();

function fragment(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function showPart(html) {
  for (const next of [...fragment(html).children]) {
    const old = document.getElementById(next.id);
    if (old && old.outerHTML !== next.outerHTML) old.replaceWith(next);
  }
}

function showRows(html) {
  const rows = document.getElementById("rows");
  const news = [...fragment(html).children].filter((each) => !document.getElementById(each.id));
  rows.prepend(...news);
  while (rows.children.length > ROWS_MAX) rows.lastElementChild.remove();
}

function say(isLive) {
  for (const each of document.querySelectorAll("[data-live]")) each.hidden = !isLive;
}

function open(place) {
  const url = new URL(place.dataset.stream, document.baseURI);
  if (place.dataset.last) url.searchParams.set("after", place.dataset.last);
  const stream = new EventSource(url);
  stream.addEventListener("part", (event) => showPart(event.data));
  stream.addEventListener("rows", (event) => {
    place.dataset.last = event.lastEventId;
    showRows(event.data);
  });
  stream.addEventListener("open", () => say(true));
  stream.addEventListener("error", () => say(false));
  streams.set(place, stream);
}

function close() {
  for (const stream of streams.values()) stream.close();
  streams.clear();
  say(false);
}

function follow() {
  if (document.visibilityState === "hidden") close();
  else if (!streams.size) document.querySelectorAll("[data-stream]").forEach(open);
}

document.addEventListener("visibilitychange", follow);
addEventListener("pagehide", close);
addEventListener("pageshow", follow);
