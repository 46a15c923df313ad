// Live sections, dialogs and copying. Each page works without this file.

const main = document.getElementById("main");
const line = document.getElementById("state");
const pause = document.getElementById("pause");
const events = document.body.dataset.events;

/** Sections that wait until the person's hand is away, as HTML by name. */
const waiting = new Map();
let handY = null;
let source = null;
let paused = false;
let lastAnswer = line?.querySelector("time")?.textContent;
let retryAfter = 2000;
let asking = false;

const say = (text) => {
  if (line && line.textContent !== text) line.textContent = text;
};

// Live sections

function connect() {
  if (!events || source || paused || document.hidden) return;
  source = new EventSource(events);
  source.addEventListener("answer", (event) => {
    const { at, sections } = JSON.parse(event.data);
    retryAfter = 2000;
    lastAnswer = at;
    for (const [name, html] of Object.entries(sections)) waiting.set(name, html);
    document.body.classList.remove("stale");
    apply();
  });
  source.addEventListener("silent", (event) => silent(JSON.parse(event.data).at ?? lastAnswer));
  source.addEventListener("again", (event) => {
    disconnect();
    setTimeout(connect, JSON.parse(event.data).after);
  });
  source.addEventListener("error", () => {
    silent(lastAnswer);
    // After an answer that is no stream, such as a proxy's 502, a browser gives up.
    if (source?.readyState !== EventSource.CLOSED) return;
    disconnect();
    setTimeout(connect, retryAfter);
    retryAfter = Math.min(2 * retryAfter, 60000);
  });
}

function disconnect() {
  source?.close();
  source = null;
}

function silent(at) {
  document.body.classList.add("stale");
  say(`No answer since ${at}. Trying again.`);
}

/** Show what has come, but for sections under a person's hand. */
function apply() {
  for (const section of document.querySelectorAll("section[data-live]")) {
    const html = waiting.get(section.dataset.live);
    if (html === undefined || isHeld(section)) continue;
    waiting.delete(section.dataset.live);
    inPlace(() => {
      section.innerHTML = html;
      equip(section);
    });
  }
  if (paused || document.body.classList.contains("stale")) return;
  const behind = waiting.size ? " Newer values wait while you are at work here." : "";
  say(`Live, as of ${lastAnswer}.${behind}`);
}

/** Whether a swap could take away what a person reads, marks or is about to press. */
function isHeld(section) {
  const selection = getSelection();
  return Boolean(
    document.querySelector("dialog[open]") ||
      main.querySelector(":is(a, button, input, select, summary, label):hover") ||
      main.querySelector(":focus-visible") ||
      section.querySelector("details[open]") ||
      (selection && !selection.isCollapsed && main.contains(selection.anchorNode)),
  );
}

/** Change a section, and keep where it is what the pointer is at, or else the middle of a page that is scrolled. */
function inPlace(change) {
  const y = handY ?? (scrollY > 0 ? innerHeight / 2 : 0);
  const anchor = [...main.children].findLast((each) => each.getBoundingClientRect().top <= y);
  const before = anchor?.getBoundingClientRect().top;
  change();
  if (anchor) scrollBy(0, anchor.getBoundingClientRect().top - before);
}

function setPaused(now) {
  paused = now;
  pause.setAttribute("aria-pressed", String(now));
  disconnect();
  if (now) say(`Paused, as of ${lastAnswer}.`);
  else connect();
}

if (events) {
  pause.hidden = false;
  pause.addEventListener("click", () => setPaused(!paused));
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  document.addEventListener("pointermove", ({ clientY }) => (handY = clientY), { passive: true });
  document.documentElement.addEventListener("pointerleave", () => (handY = null));
  for (const moved of ["pointerout", "focusout", "selectionchange", "toggle"]) {
    document.addEventListener(moved, () => waiting.size && !paused && setTimeout(apply), { capture: true, passive: true });
  }
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", connect);
  connect();
}

// Dialogs: the first step of a decision, in the page

async function ask(url, options) {
  if (asking) return; // a second click
  asking = true;
  try {
    const answer = await fetch(url, { ...options, headers: { accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
    if (answer.redirected || !page) location.assign(answer.url);
    else show(page, answer.url);
  } catch {
    const page = document.createElement("main");
    page.innerHTML = "<h1>The server does not answer</h1><p>Look at the decisions before you decide again.</p>";
    show(page, document.baseURI);
  } finally {
    asking = false;
  }
}

function show(page, url) {
  document.querySelector("dialog")?.close();
  for (const name of ["href", "action"]) {
    for (const each of page.querySelectorAll(`[${name}]`)) each.setAttribute(name, new URL(each.getAttribute(name), url).href);
  }
  const dialog = document.createElement("dialog");
  const title = document.createElement("h2");
  const old = page.querySelector("h1");
  title.id = "dialog-title";
  title.append(...(old?.childNodes ?? []));
  old?.replaceWith(title);
  dialog.setAttribute("aria-labelledby", title.id);
  dialog.append(...page.childNodes);
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "Close";
  close.addEventListener("click", () => dialog.close());
  dialog.append(close);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  equip(dialog);
  dialog.showModal();
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.matches("form[data-dialog]")) return;
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  ask(new URL(form.getAttribute("action"), document.baseURI), { method: "POST", body: fields });
});

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-dialog]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  ask(link.href, {});
});

// Copying

function equip(part) {
  for (const each of part.querySelectorAll("[data-copy]")) each.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const words = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    // Without TLS a page of another host may not.
    button.textContent = "Not allowed here; mark the text and copy it";
  }
  setTimeout(() => (button.textContent = words), 2000);
});

equip(document);
