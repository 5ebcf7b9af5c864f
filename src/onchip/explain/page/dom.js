"use strict";
// Helpers that every part uses. A part is a function of the numbers; `state` holds what parts share.

const $ = (id) => document.getElementById(id);

/** An element: h("p", {class: "dim"}, "text", child, ...). A function among the attributes is a listener. */
function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Choices [[value, text], ...] of a select, with one of them chosen. */
function options(select, choices, chosen) {
  select.replaceChildren(...choices.map(([value, text]) => h("option", { value }, text)));
  if (chosen !== undefined) select.value = String(chosen);
}

const listeners = [];
const state = { device: null };

function onDevice(listener) {
  listeners.push(listener);
  listener(state.device);
}

const whole = (n) => Math.round(n).toLocaleString("en-US");
const short = (n) => scaled(n, 1000, ["", " k", " M", " G", " T", " P"]);
const bytes = (n) => scaled(n, 1000, [" B", " kB", " MB", " GB", " TB", " PB"]);
const binary = (n) => scaled(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;

function scaled(n, base, units) {
  let unit = 0;
  while (Math.abs(n) >= base && unit < units.length - 1) { n /= base; unit++; }
  return `${Number(n.toPrecision(3))}${units[unit]}`;
}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(1e3 * seconds).toPrecision(3)} ms` : `${(1e6 * seconds).toPrecision(3)} µs`;
}

/** Rows of bars: [[label, [[value, class], ...], text, note], ...] on a scale up to `most`. */
function bars(rows, most) {
  const cells = rows.flatMap(([label, parts, text, row]) => [
    h("span", { class: row || false }, label),
    h("span", { class: "track", "aria-hidden": "true" }, ...parts.map(([value, kind]) => {
      const bar = h("i", { class: kind });
      bar.style.width = `${most ? Math.min(100, (100 * value) / most) : 0}%`;
      return bar;
    })),
    h("span", { class: "count" }, text),
  ]);
  return h("div", { class: "bars" }, ...cells);
}

/** A table: names of columns, rows of texts; the first column is the row's head. */
function table(head, rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, ...head.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell, i) =>
      i ? h("td", { class: cell.best ? "best" : false }, cell.text ?? cell) : h("th", { scope: "row" }, cell)))))));
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** The embedded numbers: {numbers, data}. */
async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const plain = await new Response(stream).arrayBuffer();
  const length = new DataView(plain).getUint32(0, true);
  const numbers = JSON.parse(new TextDecoder().decode(new Uint8Array(plain, 4, length)));
  return { numbers, data: new Uint8Array(plain, 4 + length) };
}

const LABELS = {
  standard: "standard", eager: "standard in PyTorch", flash1: "FlashAttention", flash2: "FlashAttention-2",
  onchip: "onchip", hopper: "onchip on Hopper", minimum: "each tensor once",
};
const TENSORS = {
  q: "Q", k: "K", v: "V", out: "out", S: "S", P: "P", lse: "lse", dout: "dO", dq: "dQ", dk: "dK", dv: "dV", dP: "dP",
  dS: "dS", delta: "δ", row_lse: "lse", l: "ℓ", m: "m",
};
const tensorName = (name) => TENSORS[name] ?? name;
