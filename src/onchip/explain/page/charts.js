"use strict";
// Parts 6, 7 and 8: uPlot charts, each with the same numbers as a table below it.

const drawn = new Map();

/** A chart in `place`, drawn again when width or colours change.
 * lines: [{label, values, dash, points, thin}], colours in order; options of scales and axes: {x, y} of {log, label, say}. */
function chart(place, xs, lines, axes, label) {
  const make = () => {
    drawn.get(place)?.plot.destroy();
    const ink = css("--ink"), grid = { stroke: css("--line"), width: 1 };
    const axis = ({ label: text, say, at }) => ({ ...(at ? { splits: () => at } : {}), stroke: ink, grid, ticks: grid, label: text, labelSize: 22, labelFont: "13px system-ui, sans-serif",
      font: "12px system-ui, sans-serif", values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : say(tick))) });
    const scale = ({ log, range }) => ({ ...(log ? { distr: 3, log } : {}), ...(range ? { range } : {}), time: false });
    const series = lines.map((line, i) => {
      const colour = css(`--c${(line.colour ?? i) % 6}`);
      return { label: line.label, stroke: line.only ? undefined : colour, width: line.thin ? 1 : 2, dash: line.dash, spanGaps: true,
        paths: line.only ? () => null : undefined, points: { show: !line.thin, size: line.only ? 9 : 7, stroke: colour, fill: line.hollow ? css("--paper") : colour },
        value: (_, v) => (v == null ? "–" : axes.y.say(v)) };
    });
    const plot = new uPlot({ width: place.clientWidth, height: Math.min(380, Math.max(280, place.clientWidth * 0.5)),
      scales: { x: scale(axes.x), y: scale(axes.y) }, axes: [axis(axes.x), { ...axis(axes.y), size: 62 }],
      series: [{ label: axes.x.short ?? axes.x.label, value: (_, v) => (v == null ? "–" : axes.x.say(v)) }, ...series],
      legend: { markers: { width: 0, fill: (_, i) => css(`--c${(lines[i - 1]?.colour ?? i - 1) % 6}`) } },
      hooks: { draw: [(u) => lines.forEach((line, i) => names(u, i + 1, line.names, ink))] },
    }, [xs, ...lines.map((line) => line.values)], place);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", label);
    drawn.set(place, { plot, make, width: place.clientWidth });
  };
  make();
}

/** Writes the names of a series' points right of them; above where the name begins with ^, left with <. */
function names(u, series, words, ink) {
  if (!words) return;
  u.ctx.save();
  u.ctx.fillStyle = ink;
  u.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  u.data[series].forEach((y, i) => {
    if (y == null) return;
    const [x, top] = [u.valToPos(u.data[0][i], "x", true), u.valToPos(y, "y", true)];
    const [align, right, down] = { "^": ["center", 0, -9], "<": ["right", -9, 0] }[words[i][0]] ?? ["left", 9, 12];
    u.ctx.textAlign = align;
    u.ctx.fillText(words[i].replace(/^[<^]/, ""), x + right * devicePixelRatio, top + down * devicePixelRatio);
  });
  u.ctx.restore();
}

function numbers(place, axes, xs, lines, caption) {
  const rows = xs.map((x, i) => [axes.x.say(x), ...lines.map((line) => (line.values[i] == null ? "–" : axes.y.say(line.values[i])))]);
  const shown = h("details", {}, h("summary", {}, "The numbers"), table([axes.x.short ?? axes.x.label, ...lines.map((line) => line.label)], rows, caption));
  if (place.nextElementSibling?.tagName === "DETAILS") place.nextElementSibling.remove();
  place.after(shown);
}

function redrawCharts() {
  for (const { make } of [...drawn.values()]) make();
}

const DASHES = [undefined, [8, 4], [2, 3], undefined, [10, 3, 2, 3], [4, 4]];

function curvesPart({ lengths, memory, rooflines, points }) {
  const x = { log: 2, label: "sequence length N", short: "N", say: (n) => whole(n) }, y = { log: 10, label: "bytes", say: bytes };
  options($("length-pass"), [["forward", "forward"], ["backward", "backward"]], "forward");
  const showLengths = () => {
    const lines = Object.entries(lengths[$("length-pass").value]).map(([name, values], i) => ({ label: LABELS[name], values, dash: DASHES[i] }));
    const said = `Traffic against N, ${$("length-pass").value}`;
    chart($("length-chart"), lengths.seqlens, lines, { x, y }, said);
    numbers($("length-chart"), { x, y }, lengths.seqlens, lines, said);
  };
  $("own-tiles").textContent = `${lengths.tiles.join(" × ")} at N = 4096`;
  $("length-pass").addEventListener("change", showLengths);
  showLengths();
  const fast = { x: { log: 2, label: "fast memory M, bytes", short: "M", say: binary }, y: { log: 10, label: "numbers moved", say: short } };
  const lines = [["standard", memory.standard], ["FlashAttention", memory.flash1], ["N²d²/M", memory.bound]].map(([label, values], i) => ({ label, values, dash: DASHES[i] }));
  chart($("memory-chart"), memory.sram, lines, fast, "Traffic against the size of fast memory");
  numbers($("memory-chart"), fast, memory.sram, lines, "Traffic against the size of fast memory");
  onDevice((device) => roof(device, rooflines[device.name], device.name === "H200" ? points : []));
}

const SPOT = { attention: "^fused attention", matmul: "", layer_norm: "<layer norm" }; // matmul lies beside attention

function roof(device, { peak, bandwidth, ridge, ops }, points) {
  const names = ops.map(([op]) => op.replace("_", " "));
  const at = [...ops.map(([, intensity]) => intensity), ...points.map((p) => p.intensity), ridge, 0.1, 20000].sort((a, b) => a - b);
  const xs = [...new Set(at)];
  const only = (list, pick) => xs.map((x) => list.filter((each) => pick(each)[0] === x).map((each) => pick(each)[1])[0] ?? null);
  const lines = [{ label: "roof", values: xs.map((x) => Math.min(peak, x * bandwidth)), thin: true, colour: 5 },
    { label: "operations, at best", values: only(ops, ([, x, y]) => [x, y]), only: true, hollow: true, colour: 0, names: only(ops, ([op, x]) => [x, SPOT[op] ?? op]) }];
  const kinds = [["measured: bytes and time", (p) => p.bytes === "measured", 1], ["measured: time", (p) => p.bytes === "modelled", 2]];
  for (const [label, pick, colour] of kinds) {
    const list = points.filter(pick);
    if (list.length) lines.push({ label, values: only(list, (p) => [p.intensity, p.flops]), only: true, colour });
  }
  const axes = { x: { log: 10, label: "FLOPs a byte", say: (v) => short(v) }, y: { log: 10, label: "FLOP/s", say: (v) => short(v), range: [2e11, 4e15] } };
  const place = $("roof-chart"), said = `Roofline of ${device.title} in fp16; the ridge is at ${Math.round(ridge)} FLOPs a byte`;
  chart(place, xs, lines, axes, said);
  if (place.nextElementSibling?.tagName === "DETAILS") place.nextElementSibling.remove();
  const rows = [...ops.map(([, x, y, bound], i) => [names[i], x.toPrecision(3), `${short(y)} at best`, bound]),
    ...points.map((p) => [p.label, p.intensity.toPrecision(3), `${short(p.flops)} measured`, p.intensity < ridge ? "memory" : "compute"])];
  place.after(h("details", {}, h("summary", {}, "The points"), table(["operation", "FLOPs a byte", "FLOP/s", "limit"], rows, said)));
}

function sparsePart({ rows, patterns }) {
  $("patterns").replaceChildren(...patterns.map((pattern) => {
    const side = pattern.kinds.length, canvas = h("canvas", { width: side, height: side, role: "img", "aria-label": `${pattern.name}: ${percent(pattern.blocks)} of the blocks` });
    const draw = () => {
      const c = canvas.getContext("2d"), colours = [css("--empty"), css("--accent"), css("--accent")];
      pattern.kinds.forEach((row, m) => [...row].forEach((kind, n) => { c.fillStyle = colours[kind]; c.fillRect(n, m, 1, 1); }));
    };
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    return h("figure", {}, canvas, h("figcaption", {}, h("b", {}, pattern.name.replace("_", " and ")), `, ${pattern.about}: ${percent(pattern.blocks)} of the blocks, ${percent(pattern.traffic)} of the traffic`));
  }));
  const order = [...rows].reverse(), xs = order.map((row) => row.blocks);
  const pick = (step, what) => order.map((row) => row[step][what]);
  const lines = [{ label: "traffic, forward", values: pick("forward", "traffic"), dash: [8, 4] }, { label: "time, forward", values: pick("forward", "time") },
    { label: "traffic, backward", values: pick("backward", "traffic"), dash: [8, 4] }, { label: "time, backward", values: pick("backward", "time") },
    { label: "in proportion", values: xs, thin: true, colour: 5 }];
  const axes = { x: { label: "share of blocks", say: percent, range: [0, 1.05] }, y: { label: "share of the full mask's", say: percent, range: [0, 1.05] } };
  chart($("sparse-chart"), xs, lines, axes, "Traffic and time of block-sparse masks against the share of blocks");
  $("sparse-table").replaceChildren(table(["blocks", "traffic, forward", "time, forward", "ms", "traffic, backward", "time, backward", "ms"],
    rows.map((row) => [percent(row.blocks), percent(row.forward.traffic), percent(row.forward.time), row.ms.forward.toFixed(2),
      percent(row.backward.traffic), percent(row.backward.time), row.ms.backward.toFixed(2)]), "Block-sparse masks: traffic and time"));
}

function resultsPart(runs, names) {
  const fill = () => {
    const keys = Object.keys(runs[$("run").value].tables).map((key) => key.split(","));
    [["run-pass", 0], ["run-dim", 1], ["run-mask", 2]].forEach(([id, part]) => {
      const choices = [...new Set(keys.map((key) => key[part]))], before = $(id).value || { "run-dim": "128" }[id];
      options($(id), choices.map((c) => [c, c]), choices.includes(before) ? before : choices[0]);
    });
    show();
  };
  const show = () => {
    const run = runs[$("run").value], found = run.tables[[$("run-pass").value, $("run-dim").value, $("run-mask").value].join(",")];
    const { seqlen, ...rates } = found, impls = Object.keys(names).filter((name) => rates[name]);
    const order = Object.keys(names);
    const lines = impls.map((name) => ({ label: names[name], values: rates[name], colour: order.indexOf(name), dash: name === "onchip" ? undefined : DASHES[order.indexOf(name)] }));
    const most = Math.max(...lines.flatMap((line) => line.values));
    const axes = { x: { log: 2, label: "sequence length N", say: whole, short: "N", at: seqlen, range: [seqlen[0] / 1.2, seqlen[seqlen.length - 1] * 1.2] }, y: { label: "TFLOP/s", say: (v) => String(Math.round(v)), range: [0, most * 1.08] } };
    const said = `TFLOP/s, ${$("run-pass").value}, d = ${$("run-dim").value}, ${$("run-mask").value}: ${run.title}`;
    chart($("run-chart"), seqlen, lines, axes, said);
    $("run-table").replaceChildren(table(["N", ...lines.map((line) => line.label)], seqlen.map((n, i) => {
      const best = Math.max(...lines.map((line) => line.values[i]));
      return [whole(n), ...lines.map((line) => ({ text: Math.round(line.values[i]).toString(), best: line.values[i] === best }))];
    }), said));
    $("run-about").textContent = `${run.about}. Bold: the best of the row.`;
  };
  options($("run"), runs.map((run, i) => [i, run.title]), 0);
  $("run").addEventListener("change", fill);
  for (const id of ["run-pass", "run-dim", "run-mask"]) $(id).addEventListener("change", show);
  fill();
}
