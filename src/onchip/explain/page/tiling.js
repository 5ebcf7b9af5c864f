"use strict";
// Part 4: plays the steps that Python has written down, and adds up what they move.

const ABOUT = {
  standard: "Standard attention: three kernels one after the other. Each tile of S is written (orange), read again to make P (purple), and P is read again to make the output (green). A mask saves nothing: every tile is carried, hidden ones too.",
  flash1: "FlashAttention (Algorithm 1): first an empty output, with m and ℓ, is written. Then the outer loop goes over keys, column by column. K and V are read once; for each tile the rows of Q and of the unfinished output, with m and ℓ, come in and go out again. S and P never leave SRAM.",
  flash2: "FlashAttention-2: the loops are swapped. A row of queries stays in SRAM with its unfinished output while the keys pass by; the output is written once. Backward goes by keys, and adds to dQ in HBM at every tile.",
  onchip: "onchip: forward in FlashAttention-2's order; tiles that a mask hides are left out. The longest rows of a causal mask or of blocks start first, so that no long one is left at the end; under masks of blocks and functions a row takes its partly masked tiles first. Its Triton kernels' backward makes two passes, one by keys for dK and dV and one by queries for dQ: scores are computed once more, but nothing is added up in HBM, so the result is the same bits each time.",
  hopper: "onchip on Hopper GPUs: the same loops, but a row goes from its last keys to its first. The tile on the diagonal, which needs the mask, comes first, and the mask is done before the fast run over full tiles begins. A row that sees nothing still reads one tile. Backward is the Triton kernels'.",
};
const PHASES = { "zero O": "an empty output", "zero dQ": "an empty dQ", "zero dq": "an empty dQ", attend: "attention", gradients: "gradients", dkdv: "dK and dV", dq: "dQ", delta: "δ = row sums of dO · out" };
const SPEEDS = [["2", "2 steps a second"], ["8", "8 steps a second"], ["20s", "all in 20 s"], ["6s", "all in 6 s"]];

function tilingPart({ grid }, data) {
  const chosen = { algorithm: 0, tile: [64, 64] };
  let run = null, stage = null, at = 0, sums = null, timer = null;

  const seqlen = () => Number($("seqlen").value), dim = () => Number($("dim").value);
  const setting = () => `${seqlen()},${$("mask").value},${chosen.tile.join(",")}`;
  const found = (algorithm) => grid.runs[`${setting()},${algorithm},${$("pass").value}`];
  const cut = ([start, length]) => data.subarray(start, start + length);
  const kept = (m, n) => grid.itemsize * grid.sram[dim()][`${m},${n}`];

  /** The steps of a run, with the moves of the chosen dim. */
  function decode(algorithm) {
    const [order, moves, totals] = found(algorithm), d = grid.dims.indexOf(dim());
    const table = grid.moves[moves[d]], raw = cut(grid.orders[order]), steps = [];
    let m = 0, n = 0;
    for (let i = 0; i < raw.length; i += 3) {
      m = (m + raw[i]) % 256;
      n = (n + raw[i + 1]) % 256;
      const [phase, loads, stores] = table[raw[i + 2]];
      steps.push({ m, n, phase, loads, stores });
    }
    const names = [...new Set(table.flatMap(([, loads, stores]) => [...loads, ...stores].map(([name]) => name)))];
    return { steps, names, reads: totals[d][0], writes: totals[d][1], pairs: totals[d][2] };
  }

  /** Largest tile of a slider that fits beside the other side's; at least the smallest there is. */
  function cap(side) {
    const sizes = grid.tiles[seqlen()];
    const fits = sizes.filter((t) => (side ? kept(chosen.tile[0], t) : kept(t, chosen.tile[1])) <= state.device.unit_sram);
    return fits.length ? sizes.indexOf(fits[fits.length - 1]) : 0;
  }

  /** Bring both tiles to sizes that exist for this N and fit in SRAM, and say so at the sliders. */
  function fit() {
    const sizes = grid.tiles[seqlen()];
    for (const side of [0, 1]) {
      const below = sizes.filter((t) => t <= chosen.tile[side]);
      chosen.tile[side] = below.length ? below[below.length - 1] : sizes[0];
    }
    const larger = () => (chosen.tile[1] >= chosen.tile[0] ? 1 : 0);
    while (kept(...chosen.tile) > state.device.unit_sram && Math.max(...chosen.tile) > sizes[0]) {
      const side = larger();
      chosen.tile[side] = sizes[sizes.indexOf(chosen.tile[side]) - 1];
    }
    ["tile-m", "tile-n"].forEach((id, side) => {
      $(id).max = cap(side);
      $(id).value = sizes.indexOf(chosen.tile[side]);
      $(id).setAttribute("aria-valuetext", `${chosen.tile[side]} of at most ${sizes[cap(side)]}`);
      $(`${id}-said`).textContent = chosen.tile[side];
    });
    const need = kept(...chosen.tile), have = state.device.unit_sram;
    $("fits").textContent = `A tile keeps Q, out, K, V and scores in SRAM: ${binary(need)} in fp16, ` +
      (need <= have ? `${percent(need / have)} of the ${binary(have)} of one unit of ${state.device.title}. The sliders end where it is full.`
        : `more than the ${binary(have)} of one unit of ${state.device.title}: no tile of this list fits.`);
  }

  function restart() {
    pause();
    fit();
    run = decode(chosen.algorithm);
    $("scrub").max = run.steps.length;
    const [name, about, texts] = grid.masks[$("mask").value];
    $("about-mask").textContent = `Mask ${name}: ${about}; ${percent(run.pairs / seqlen() ** 2)} of the pairs are visible. ` +
      `Written: ${texts[seqlen()]}`;
    $("about-mode").textContent = ABOUT[grid.algorithms[chosen.algorithm]];
    go(0);
  }

  /** Show the state after `count` steps. */
  function go(count) {
    if (!count || count < at || !stage) {
      const kinds = cut(grid.maps[grid.kinds[setting()]]);
      stage = new Stage(Math.ceil(seqlen() / chosen.tile[0]), Math.ceil(seqlen() / chosen.tile[1]), kinds);
      sums = { read: 0, written: 0, tensors: Object.fromEntries(run.names.map((name) => [name, [0, 0]])) };
      at = 0;
    }
    for (; at < count; at++) {
      const step = run.steps[at];
      stage.take(step);
      for (const [name, n] of step.loads) { sums.tensors[name][0] += n; sums.read += n; }
      for (const [name, n] of step.stores) { sums.tensors[name][1] += n; sums.written += n; }
    }
    show();
  }

  function show() {
    stage.draw($("matrix"), seqlen(), chosen.tile);
    $("scrub").value = at;
    $("scrub-said").textContent = `${whole(at)} of ${whole(run.steps.length)}`;
    $("scrub").setAttribute("aria-valuetext", $("scrub-said").textContent);
    $("step-said").textContent = at ? sentence(run.steps[at - 1]) : `Nothing has moved yet. ${whole(run.steps.length)} steps.`;
    $("read").textContent = whole(sums.read);
    $("written").textContent = whole(sums.written);
    $("model").textContent = `the traffic model's total: ${whole(run.reads)} read, ${whole(run.writes)} written.`;
    const most = Math.max(...Object.values(sums.tensors).flat(), (run.reads + run.writes) / run.names.length);
    $("tensors").replaceChildren(bars(run.names.map((name) => {
      const [read, written] = sums.tensors[name];
      return [tensorName(name), [[read, "i-read"], [written, "i-write"]], `${short(read)} / ${short(written)}`];
    }), 2 * most), h("p", { class: "legend dim" }, key("i-read", "read"), key("i-write", "written")));
    rivals();
  }

  /** Totals of every algorithm on these settings; the shown one fills up. */
  function rivals() {
    const d = grid.dims.indexOf(dim());
    const totals = grid.algorithms.map((_, a) => found(a)[2][d].slice(0, 2));
    const most = Math.max(...totals.map(([reads, writes]) => reads + writes));
    $("rivals").replaceChildren(bars(grid.algorithms.map((name, a) => {
      const here = a === chosen.algorithm, [reads, writes] = here ? [sums.read, sums.written] : totals[a];
      return [LABELS[name], [[reads, "i-read"], [writes, "i-write"]], here ? `${short(reads + writes)} of ${short(totals[a][0] + totals[a][1])}` : short(reads + writes), here ? "rival-now" : ""];
    }), most));
  }

  function sentence(step) {
    const where = step.m && step.n ? `tile row ${step.m}, column ${step.n}` : step.m ? `tile row ${step.m}` : `tile column ${step.n}`;
    const list = (moves) => moves.map(([name, n]) => `${tensorName(name)} ${whole(n)}`).join(", ");
    const parts = [step.loads.length ? `reads ${list(step.loads)}` : "", step.stores.length ? `writes ${list(step.stores)}` : ""].filter(Boolean);
    return `${PHASES[step.phase] ?? step.phase.replace("^T", "ᵀ")}; ${where}: ${parts.join("; ") || "moves nothing, all it needs is in SRAM"}.`;
  }

  const key = (kind, text) => h("span", {}, h("i", { class: kind }), text);

  function pause() {
    clearInterval(timer);
    timer = null;
    $("play").textContent = "Play";
    $("step-said").setAttribute("aria-live", "polite");
  }

  function play() {
    if (timer) return pause();
    if (at === run.steps.length) go(0);
    $("play").textContent = "Pause";
    $("step-said").setAttribute("aria-live", "off"); // a reader would never catch up
    const speed = $("speed").value;
    const rate = speed.endsWith("s") ? run.steps.length / parseFloat(speed) : Number(speed);
    const began = performance.now(), from = at;
    timer = setInterval(() => {
      const to = Math.min(from + Math.floor(((performance.now() - began) / 1000) * rate), run.steps.length);
      if (to > at) go(to);
      if (at === run.steps.length) pause();
    }, still() ? 1000 : 1000 / Math.min(Math.max(rate, 1), 30));
  }

  const by = (count) => { pause(); go(Math.max(0, Math.min(run.steps.length, count))); };
  $("modes").replaceChildren(...grid.algorithms.map((name, a) => h("label", {},
    h("input", { type: "radio", name: "mode", value: a, checked: a === 0, change: () => { chosen.algorithm = a; restart(); } }), ` ${LABELS[name]}`)));
  options($("pass"), grid.passes.map((name, i) => [i, name]), 0);
  options($("seqlen"), grid.seqlens.map((n) => [n, whole(n)]), grid.chosen.seqlen);
  options($("dim"), grid.dims.map((d) => [d, d]), grid.chosen.dim);
  options($("mask"), grid.masks.map(([name], i) => [i, name]), grid.chosen.mask);
  options($("speed"), SPEEDS, "20s");
  $("legend").replaceChildren(...[["--tile", "tile in SRAM"], ["--scores", "S (dP) written"], ["--weights", "P (dS) written"], ["--out", "output written"],
    ["--read", "being read"], ["--seen", "visited"], ["--partial", "partly masked (hatched)"], ["--empty", "masked"]].map(([colour, text]) => {
    const patch = h("i");
    patch.style.background = `var(${colour})`;
    return h("span", {}, patch, text);
  }));
  for (const id of ["pass", "seqlen", "dim", "mask"]) $(id).addEventListener("change", restart);
  for (const [id, side] of [["tile-m", 0], ["tile-n", 1]]) {
    $(id).addEventListener("input", () => { chosen.tile[side] = grid.tiles[seqlen()][$(id).value]; restart(); });
  }
  $("play").addEventListener("click", play);
  $("speed").addEventListener("change", () => { if (timer) { pause(); play(); } });
  $("first").addEventListener("click", () => by(0));
  $("last").addEventListener("click", () => by(run.steps.length));
  $("next").addEventListener("click", () => by(at + 1));
  $("back").addEventListener("click", () => by(at - 1));
  $("scrub").addEventListener("input", () => by(Number($("scrub").value)));
  onDevice(restart);
  const redraw = () => stage.draw($("matrix"), seqlen(), chosen.tile);
  new ResizeObserver(redraw).observe($("matrix").parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
