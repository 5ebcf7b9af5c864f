"use strict";
// Part 3: scores in blocks, moved by pointer or keyboard; m and l of each block and of the blocks so far.

const START = [[1, 3, 2], [5, 0], [2, 4, 1]];

/** The greatest score and the sum of e^(s - m); (-inf, 0) of none. */
function summary(scores) {
  const m = Math.max(...scores, -Infinity);
  return { m, l: scores.reduce((sum, s) => sum + Math.exp(s - m), 0) };
}

/** The summary of two parts. */
function merge(a, b) {
  const m = Math.max(a.m, b.m);
  const part = (x) => (x.l ? x.l * Math.exp(x.m - m) : 0);
  return { m, l: part(a) + part(b) };
}

function softmaxPart() {
  let blocks = START.map((block) => [...block]);
  const place = $("blocks");
  const number = (x) => (x === -Infinity ? "−∞" : x < 0 ? `−${-x}` : String(x));
  const decimals = (x) => x.toFixed(4);

  function show(focus) {
    const all = summary(blocks.flat());
    let before = { m: -Infinity, l: 0 };
    place.replaceChildren(...blocks.map((scores, b) => {
      const own = summary(scores), after = merge(before, own);
      const factor = before.l ? Math.exp(before.m - after.m) : null;
      before = after;
      const boxes = scores.map((s, i) => h("button", {
        type: "button", class: "score", "data-block": b, "data-index": i, pointerdown: hold, keydown: key,
        "aria-label": `score ${s} in block ${b + 1}, weight ${(Math.exp(s - all.m) / all.l).toFixed(3)}`,
      }, number(s), h("small", {}, (Math.exp(s - all.m) / all.l).toFixed(3))));
      return h("div", { class: "block", "data-block": b, role: "group", "aria-label": `Block ${b + 1}` },
        h("h3", {}, `Block ${b + 1}`), h("div", { class: "scores" }, ...boxes),
        h("dl", {}, h("dt", {}, "its own"), h("dd", { class: "own" }, `m = ${number(own.m)}, ℓ = ${decimals(own.l)}`),
          h("dt", {}, "so far"), h("dd", { class: "so-far" }, `m = ${number(after.m)}, ℓ = ${decimals(after.l)}`),
          h("dt", {}, "old part"), h("dd", {}, factor === null ? "none yet" : `× ${decimals(factor)}`)));
    }));
    $("softmax-total").textContent = `All blocks merged: m = ${number(before.m)}, ℓ = ${decimals(before.l)}. ` +
      `Over the whole row at once: m = ${number(all.m)}, ℓ = ${decimals(all.l)}: the same, however the scores are spread. ` +
      "Under each score its weight, e^(s − m) / ℓ.";
    if (focus) place.querySelector(`[data-block="${focus[0]}"][data-index="${focus[1]}"]`).focus();
  }

  function move(from, index, to) {
    const [score] = blocks[from].splice(index, 1);
    blocks[to].push(score);
    show([to, blocks[to].length - 1]);
    say(score, to);
  }

  function say(score, block) {
    const own = summary(blocks[block]);
    $("softmax-live").textContent = `Score ${score}, block ${block + 1}: m ${own.m}, l ${decimals(own.l)}. ${$("softmax-total").textContent}`;
  }

  function key(event) {
    const { block, index } = event.currentTarget.dataset;
    const [b, i] = [Number(block), Number(index)];
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key], change = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (sideways === undefined && change === undefined) return;
    event.preventDefault();
    if (sideways) {
      if (blocks[b + sideways]) move(b, i, b + sideways);
      return;
    }
    blocks[b][i] = Math.max(-9, Math.min(9, blocks[b][i] + change));
    show([b, i]);
    say(blocks[b][i], b);
  }

  function hold(event) {
    if (event.button) return;
    const box = event.currentTarget, { clientX: x, clientY: y } = event;
    let over = null;
    const drag = (at) => {
      box.classList.add("held");
      box.style.transform = `translate(${at.clientX - x}px, ${at.clientY - y}px)`;
      const found = document.elementFromPoint(at.clientX, at.clientY)?.closest(".block") ?? null;
      if (found !== over) {
        over?.classList.remove("over");
        found?.classList.add("over");
        over = found;
      }
    };
    const drop = (at) => {
      box.removeEventListener("pointermove", drag);
      box.removeEventListener("pointerup", drop);
      box.removeEventListener("pointercancel", drop);
      const [from, index] = [Number(box.dataset.block), Number(box.dataset.index)];
      const to = over && at.type === "pointerup" ? Number(over.dataset.block) : from;
      if (to !== from) move(from, index, to);
      else if (box.classList.contains("held")) show([from, index]);
    };
    box.setPointerCapture(event.pointerId);
    box.addEventListener("pointermove", drag);
    box.addEventListener("pointerup", drop);
    box.addEventListener("pointercancel", drop);
  }

  $("softmax-mix").addEventListener("click", () => {
    const scores = blocks.flat();
    blocks = blocks.map(() => []);
    for (const score of scores) blocks[Math.floor(Math.random() * blocks.length)].push(score);
    show();
    $("softmax-live").textContent = $("softmax-total").textContent;
  });
  $("softmax-reset").addEventListener("click", () => {
    blocks = START.map((block) => [...block]);
    show();
    $("softmax-live").textContent = $("softmax-total").textContent;
  });
  show();
}
