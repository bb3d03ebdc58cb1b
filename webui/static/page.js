// Follows the coordinator: shows /page, and shows it again whenever an event says that it changed.
// The token stays in this tab (sessionStorage) and is sent as a header, never in an address.
"use strict";

const KEY = "skerry-token";
const AT_MOST_EVERY_MS = 1000;
const RETRY_MS = 3000;
const content = document.getElementById("content");
const form = document.getElementById("ask");
const status = document.getElementById("status");
let due = null;

const say = (text) => { status.textContent = text; };
const after = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function get(path) {
  const answer = await fetch(path, {
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` },
    cache: "no-store",
  });
  if (answer.status === 401 || answer.status === 403) {
    sessionStorage.removeItem(KEY);
    throw new DOMException("this token is not accepted", "NotAllowedError");
  }
  if (!answer.ok) throw new Error(`the coordinator answered ${answer.status}`);
  return answer;
}

async function show() {
  // The fragment comes from this very server, which escapes every text in it.
  content.innerHTML = await (await get("/page")).text();
  say(`as of ${new Date().toLocaleTimeString()}`);
}

function showSoon() {
  due ??= setTimeout(() => { due = null; show().catch(() => {}); }, AT_MOST_EVERY_MS);
}

async function follow() {
  const reader = (await get("/api/v1/events")).body.getReader();
  for (;;) {
    const { done } = await reader.read();
    if (done) throw new Error("the stream ended");
    showSoon();
  }
}

async function run() {
  form.hidden = true;
  for (;;) {
    try {
      await show();
      await follow();
    } catch (error) {
      if (error.name === "NotAllowedError") {
        content.replaceChildren();
        form.hidden = false;
        say(error.message);
        return;
      }
      say(`no connection (${error.message}); trying again`);
      await after(RETRY_MS);
    }
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, form.token.value.trim());
  form.token.value = "";
  run();
});

if (sessionStorage.getItem(KEY)) run();
else form.hidden = false;
