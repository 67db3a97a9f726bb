// The page: one message a second from /live -> one card a machine. Text from machines is set as text, never as HTML.
"use strict";

const cards = new Map();
const summary = document.getElementById("summary");
const list = document.getElementById("machines");
const template = document.getElementById("machine");

const bytes = (value) => {
  if (value >= 2 ** 30) return (value / 2 ** 30).toFixed(2) + " GiB";
  return value >= 2 ** 20 ? (value / 2 ** 20).toFixed(1) + " MiB" : Math.ceil(value / 1024) + " KiB";
};

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function show(view) {
  const names = new Set(view.machines.map((machine) => machine.name));
  for (const [name, card] of cards) {
    if (names.has(name)) continue;
    card.remove();
    cards.delete(name);
  }
  view.machines.forEach((machine, place) => {
    const card = cards.get(machine.name) || begin(machine.name);
    if (list.children[place] !== card) list.insertBefore(card, list.children[place] || null);
    fill(card, machine);
  });
  const count = (is) => view.machines.filter(is).length;
  const bad = count((machine) => machine.tone === "bad");
  const parts = [`${view.machines.length} machines`, `${count((machine) => machine.runs)} running`];
  if (bad) parts.push(`${bad} need you`);
  summary.textContent = view.machines.length ? `${parts.join(", ")} · ${view.taken_at.slice(0, 19)} UTC`
    : "No machine has run since the host's start. Start one with: hearth run FILE";
}

function begin(name) {
  const card = template.content.firstElementChild.cloneNode(true);
  card.addEventListener("toggle", () => details(card));
  cards.set(name, card);
  return card;
}

function fill(card, machine) {
  card.machine = machine;
  card.className = `machine ${machine.tone}`;
  const part = (name) => card.querySelector(`summary .${name}`);
  part("name").textContent = machine.name;
  part("state").textContent = machine.state;
  part("up").textContent = machine.up ? `up ${machine.up}` : "";
  part("now").textContent = machine.now.join("; ");
  bar(part("bar"), part("amount"), machine.memory);
  details(card);
}

function bar(bar, amount, memory) {
  bar.hidden = amount.hidden = !memory;
  if (!memory) return;
  const kept = memory.boot_set_bytes + memory.nvram_bytes;
  const parts = [["guest", memory.guest_bytes], ["ember", memory.ember_bytes - memory.held_bytes],
    ["held", memory.held_bytes], ["kept", kept]];
  const used = memory.guest_bytes + memory.ember_bytes + kept;
  const whole = Math.max(memory.budget_bytes, used, 1);
  while (bar.children.length < parts.length) bar.append(element("i"));
  parts.forEach(([name, size], place) => {
    bar.children[place].className = name;
    bar.children[place].style.width = `${100 * size / whole}%`;
  });
  const text = `${bytes(used)} of ${bytes(memory.budget_bytes)}`;
  amount.textContent = text;
  const names = parts.map(([name, size]) => `${name === "kept" ? "boot set and NVRAM" : name} ${bytes(size)}`);
  bar.setAttribute("aria-label", `${text}: ${names.join(", ")}`);
  bar.title = names.join(", ");
}

// What is not open is not made.
function details(card) {
  const body = card.querySelector(".body");
  if (!card.open) return body.replaceChildren();
  const { incarnation, qemu, last_recovery, ...machine } = card.machine;
  const facts = [incarnation && `incarnation ${incarnation}`, qemu && `QEMU ${qemu}`].filter(Boolean).join(", ");
  const lines = (of) => of.map((line) => element("p", line));
  section(body, "Machine", [facts, last_recovery && `last recovery: ${last_recovery}`].filter(Boolean), lines);
  section(body, "Disks", machine.disks, disks);
  section(body, "Dumps", machine.dumps, lines);
  section(body, "Snapshots saved", machine.snapshots, lines);
  section(body, "Commands", machine.commands, (all) => all.map(command));
  section(body, "Events, newest first", machine.events, lines);
}

// A part that has not changed stays as it is, with a selection or a focus that is in it.
function section(body, title, of, make) {
  let part = [...body.children].find((child) => child.title_ === title);
  if (!part) {
    part = element("section");
    part.title_ = title;
    body.append(part);
  }
  const text = JSON.stringify(of);
  if (part.shown === text) return;
  part.shown = text;
  part.className = "part-" + title.split(/[, ]/)[0].toLowerCase();
  part.replaceChildren(...(of.length ? [element("h2", title), ...make(of)] : []));
}

function disks(all) {
  const table = element("table");
  const row = (cells, tag) => {
    const made = element("tr");
    made.append(...cells.map((cell) => element(tag, cell)));
    return made;
  };
  const head = ["disk", "size", "reads/s", "read", "from memory", "writes/s", "written", "image's time", ""];
  table.append(row(head, "th"));
  for (const disk of all) {
    const rates = disk.rates;
    const rest = rates ? [rates.reads_per_s.toFixed(0), `${bytes(rates.read_bytes_per_s)}/s`,
      rates.warm_pct === null ? "–" : `${rates.warm_pct.toFixed(0)} %`, rates.writes_per_s.toFixed(0),
      `${bytes(rates.written_bytes_per_s)}/s`, rates.image_ms === null ? "–" : `${rates.image_ms.toFixed(1)} ms`]
      : Array(6).fill("–");
    const made = row([disk.name, bytes(disk.bytes), ...rest, disk.problem || ""], "td");
    if (disk.problem) made.lastChild.className = "problem";
    table.append(made);
  }
  const scroll = element("div", undefined, "scroll");
  scroll.append(table);
  return [scroll];
}

function command({ does, line }) {
  const made = element("div", undefined, "command");
  const button = element("button", "copy");
  button.dataset.line = line;
  button.setAttribute("aria-label", `copy ${line}`);
  button.addEventListener("click", () => copy(button, line));
  made.append(button, element("code", line), element("span", does));
  return made;
}

// Browsers give the clipboard only to secure pages, such as those of 127.0.0.1; elsewhere the command is selected.
async function copy(button, line) {
  try {
    await navigator.clipboard.writeText(line);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(button.nextElementSibling);
    button.textContent = "selected";
  }
}

// A browser connects again by itself after a broken connection, but not after another answer than 200, such as 503.
function follow() {
  const live = new EventSource("/live");
  live.onmessage = (message) => show(JSON.parse(message.data));
  live.onerror = () => {
    const refused = live.readyState === EventSource.CLOSED;
    summary.textContent = refused
      ? "hearth host refuses this page: too many are open, or its address is another one; trying again. What is below is old."
      : "hearth host does not answer; trying again. What is below is old.";
    if (refused) setTimeout(follow, 3000);
  };
}

follow();
