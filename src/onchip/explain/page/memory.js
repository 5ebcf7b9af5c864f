"use strict";
// Parts 1, 2 and 5: the hierarchy of a device, the trips of standard attention, what recomputation costs.

function memoryPart() {
  onDevice((device) => {
    const names = { SRAM: device.name === "cpu" ? "L2 caches of the cores" : "SRAM of all units",
      L2: device.name === "cpu" ? "Last-level cache" : "L2 cache",
      HBM: device.name === "cpu" ? "Main memory" : "Main memory (HBM)", host: "Memory of the host, over PCIe" };
    if (device.name === "RTX 4090") names.HBM = "Main memory (GDDR6X)";
    const heat = [55, 38, 22, 8];
    $("levels").replaceChildren(...device.levels.map((level, i) => {
      const speed = level.bandwidth ? `${bytes(level.bandwidth)}/s` : "no bandwidth stated";
      const item = h("li", {}, h("b", {}, names[level.name]), `${size(level)}, ${speed}`);
      item.style.width = `${Math.min(100, 10 + 15 * Math.log10(level.bytes / 1e6))}%`;
      item.style.setProperty("--heat", `${heat[i]}%`);
      return item;
    }));
    const main = device.levels.find((level) => level.name === "HBM");
    const each = { cpu: "core", MI300X: "compute unit" }[device.name] ?? "multiprocessor";
    const flops = (2 * device.peak.float16) / main.bandwidth;
    $("ratio").textContent = `One ${each} has ${binary(device.unit_sram)}: a tile must fit there. In the time in which main memory ` +
      `delivers one fp16 number, the device can do ${whole(flops)} FLOPs in fp16: whoever reads a number must do much with it.`;
    const lines = [...device.levels.map((level) => `${names[level.name]}: ${level.source}`),
      ...Object.entries(device.sources).map(([name, source]) => `${sourceNames[name] ?? name}: ${source}`)];
    $("sources").replaceChildren(...lines.map((line) => h("li", {}, line)));
  });
}

const sourceNames = { units: "number of multiprocessors or cores", unit_sram: "fast memory of one", peak: "peak rates" };
const size = (level) => (level.name === "HBM" || level.name === "host" ? bytes(level.bytes) : binary(level.bytes));

const TRIPS = [
  ["S = QKᵀ", [["q", "loads"], ["k", "loads"], ["S", "stores"]]],
  ["P = softmax(S)", [["S", "loads"], ["P", "stores"]]],
  ["out = PV", [["P", "loads"], ["v", "loads"], ["out", "stores"]]],
];

function tripsPart(trips) {
  const show = () => {
    const { standard, onchip } = trips[$("trips-n").value];
    const most = Math.max(...Object.values(standard.tensors).map((t) => Math.max(t.loads, t.stores)));
    const row = (tensors, [name, way]) => [`${way === "loads" ? "read" : "write"} ${tensorName(name)}`,
      [[tensors[name][way], { S: "i-s", P: "i-p", out: "i-out" }[name] ?? "i-read"]], short(tensors[name][way])];
    const cards = TRIPS.map(([title, moves], i) => h("li", {}, h("h3", {}, `Trip ${i + 1}: ${title}`),
      bars(moves.map((move) => row(standard.tensors, move)), most)));
    $("trips-shown").replaceChildren(h("ol", { class: "steps" }, ...cards));
    const [theirs, ours] = [standard, onchip].map((t) => t.reads + t.writes);
    $("trips-said").textContent = `Together ${whole(theirs)} numbers to and from HBM, and ${binary(standard.extra_memory)} for S and P. ` +
      `onchip's single kernel moves ${whole(ours)} and writes no score: its tiles of S and P live in SRAM. Most of what it reads ` +
      `are the same K and V again, for other queries. Once a cache catches those, HBM sees ${bytes(onchip.least)} against ` +
      `${bytes(standard.least)}: ${(standard.least / onchip.least).toFixed(0)} times less.`;
  };
  options($("trips-n"), Object.keys(trips).map((n) => [n, whole(n)]), Object.keys(trips)[0]);
  $("trips-n").addEventListener("change", show);
  show();
}

function backwardPart(paper) {
  options($("backward-pass"), [["backward", "backward"], ["forward", "forward"], ["both", "both"]], "backward");
  const names = Object.keys(paper);
  const sum = (name, pick) => {
    const pass = $("backward-pass").value;
    return (pass === "both" ? ["forward", "backward"] : [pass]).reduce((total, step) => total + pick(paper[name][step]), 0);
  };
  const show = () => {
    const device = state.device;
    const groups = [
      ["Arithmetic, FLOPs", "i-flops", (t) => t.flops, short],
      ["Traffic, every tile counted", "i-read", (t) => t.bytes, bytes],
      [`Least time on ${device.title}`, "i-time", (t) => Math.max(...t.floors[device.name]), duration],
    ];
    $("costs").replaceChildren(h("div", { class: "steps" }, ...groups.map(([title, kind, pick, say]) => {
      const values = names.map((name) => sum(name, pick));
      return h("div", {}, h("h3", {}, title), bars(names.map((name, i) => [LABELS[name], [[values[i], kind]], say(values[i])]), Math.max(...values)));
    })));
    const ratio = (pick) => sum("onchip", pick) / sum("standard", pick);
    $("costs-said").textContent = `Against standard attention onchip does ${ratio((t) => t.flops).toFixed(2)} times the arithmetic, ` +
      `moves ${percent(ratio((t) => t.bytes))} of the bytes, and could take ${percent(ratio((t) => Math.max(...t.floors[device.name])))} of its time on this device.`;
  };
  $("backward-pass").addEventListener("change", show);
  onDevice(show);
}
